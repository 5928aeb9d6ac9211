"""`whet explain` on run folders with one known illness each, or none: the first verdict names it.

The folders are constructed: rows of metrics.jsonl from policies with a given chance of a right answer, with
the noise of their samples, evaluations of 200 fixed problems, and a resolved configuration.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whetstone.config.load import build, dump
from whetstone.diagnosis.explain import diagnose, explain
from whetstone.errors import UserError
from whetstone.evaluation.statistics import accuracy, mean_interval, paired
from whetstone.files import json_safe
from whetstone.report import write_report
from whetstone.watch.server import READERS

Curve = float | Callable[[float], float]  # of the progress from 0 to 1
GROUP = 8
NUM_EVALUATED = 200


def line(start: float, end: float, first: float = 0.0, last: float = 1.0) -> Callable[[float], float]:
    """From `start` to `end` between two points of the run."""
    return lambda t: start + (end - start) * min(1.0, max(0.0, (t - first) / max(1e-9, last - first)))


@dataclass(frozen=True)
class Case:
    """A run: its right answers, what else its metrics do, and the title of its first verdict."""

    title: str
    right: Curve = 0.4  # chance of a right answer in training
    evaluated: Curve | None = None  # and in the evaluation; the same unless given
    num: int = 60
    prompts: int = 32
    evals: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)  # when
    columns: dict[str, Curve | None] = field(default_factory=dict)  # None: the metric is missing
    config: dict[str, Any] = field(default_factory=dict)
    judged: bool = True  # False: the problems have no known answers
    spread: float = 3.0  # small: the problems are all of the same difficulty


def at(curve: Curve, t: float) -> float:
    return curve(t) if callable(curve) else curve


def draw(chance: float, case: Case, rng: np.random.Generator) -> np.ndarray:
    """Right answers, prompts x group; prompts differ in difficulty."""
    chance = min(1.0, max(0.0, chance))
    if chance in (0.0, 1.0):
        return np.full((case.prompts, GROUP), chance)
    own = rng.beta(chance * case.spread, (1 - chance) * case.spread, size=(case.prompts, 1))
    return (rng.random((case.prompts, GROUP)) < own).astype(float)


def train_row(case: Case, i: int, rng: np.random.Generator) -> dict[str, Any]:
    t = i / max(1, case.num - 1)
    rewards = draw(at(case.right, t), case, rng)
    noise = rng.lognormal(0.0, 0.05, size=8)
    row: dict[str, Any] = {
        "reward": rewards.mean(), "reward_std": rewards.std(), "accuracy": rewards.mean(),
        "frac_reward_zero_std": float((rewards.std(1) == 0).mean()), "loss": 0.01 * rng.normal(),
        "grad_norm": 0.5 * noise[0] ** 4, "learning_rate": 1e-6, "skipped_steps": 0.0,
        "entropy": (0.5 - 0.15 * t) * noise[1], "completions/mean_length": (150 + 30 * t) * noise[2],
        "completions/max_length": 400 * noise[3], "completions/clipped_ratio": 0.01 * noise[4],
        "clip_ratio/region_mean": 0.0, "scoring_failures": 0.0, "time/rollout": 8 * noise[5],
        "step_time": 14 * noise[6], "sampling/sampling_logp_difference/mean": 0.004 * noise[7],
    }  # fmt: skip
    if not case.judged:
        del row["accuracy"]
    for key, curve in case.columns.items():
        value = None if curve is None else at(curve, t)
        row[key] = value if value is None else value * rng.lognormal(0.0, 0.03) if value < 0.9 else value
        if curve is None:
            del row[key]
    return {"step": i + 1, "kind": "train", **row}


def eval_document(case: Case, t: float, step: int, luck: np.ndarray, start: Any) -> tuple[dict, dict, Any]:
    """(row of metrics.jsonl, file in eval_results, answers): the same random numbers at every step."""
    chance = at(case.right if case.evaluated is None else case.evaluated, t)
    table = [[bool(u < chance)] for u in luck]
    share, delta = accuracy(table), None if start is None or not case.judged else paired(start, table)
    reward = mean_interval([[float(right)] for (right,) in table])
    row: dict[str, Any] = {"reward": reward.mean, "reward_low": reward.low, "reward_high": reward.high}
    if case.judged:
        row |= {"accuracy": share.mean, "accuracy_low": share.low, "accuracy_high": share.high}
    if delta is not None:
        row |= {"delta_vs_step0": delta.difference, "delta_vs_step0_p": delta.p_value}
    summary = {
        "accuracy": asdict(share), "greedy_accuracy": None, "temperature": 1.0, "samples_per_problem": 1,
        "pass_at_k": {"1": share.mean}, "per_task": {}, "reward": asdict(reward), "is_judged": case.judged,
        "delta_vs_step0": None if delta is None else asdict(delta),
    }  # fmt: skip
    completions = [
        {"problem": f"sums/eval/{n}", "task": "sums", "sample": 0,
         "messages": [{"role": "user", "content": "?"}], "gold": "7",
         "completion": "7" if right else "8", "answer": "7" if right else "8", "correct": right,
         "parts": {"correct": float(right)} if case.judged else {}, "length": 9, "finish": "stop",
         "reward": float(right)}
        for n, (right,) in enumerate(table[:8])
    ]  # fmt: skip
    document = {"step": step, "summary": summary, "completions": completions, "greedy_completions": []}
    return {"step": step, "kind": "eval", **row}, document, table


def make_run(folder: Path, case: Case, seed: int = 0) -> Path:
    """Write the folder of a run as `whet train` leaves it, as far as the readers look."""
    rng, luck = np.random.default_rng(seed), np.random.default_rng(seed + 1).random(NUM_EVALUATED)
    flat = {"max_steps": max(1, case.num), "num_generations": GROUP, "prompts_per_step": case.prompts}
    flat |= {"max_completion_length": 512, "learning_rate": 1e-6, "bf16": True}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump(build({**flat, **case.config})))
    rows, start = [], None
    steps = {round(t * case.num): t for t in case.evals}
    for step in range(case.num + 1):
        if step:
            rows.append(train_row(case, step - 1, rng))
        if step in steps:
            row, document, table = eval_document(case, steps[step], step, luck, start)
            start = table if start is None else start
            rows.append(row)
            (folder / "eval_results").mkdir(exist_ok=True)
            (folder / "eval_results" / f"eval_step_{step}.json").write_text(json.dumps(document))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(json_safe(row)) + "\n" for row in rows))
    return folder


HEALTHY, FLAT = "Healthy: it learns", "Nothing is wrong, but no gain beyond chance yet"
SOLVED, TOO_HIGH = "It learned to solve these problems", "The learning rate is too high"
WRONG, CUT = "No reward variance: all answers are wrong", "Most completions are cut off"
COLLAPSED, TOO_LOW = "It collapsed", "The learning rate is too low"
STILL: dict[str, Curve | None] = {"entropy": 0.5, "completions/mean_length": 150.0}
SUMS = {"datasets": {"chain_sum": {"curriculum": {"start": 1, "top": 3, "window": 128, "up": 0.8}}}}
SFT: dict[str, Curve | None] = dict.fromkeys(
    ("reward", "reward_std", "accuracy", "frac_reward_zero_std", "scoring_failures", "time/rollout")
)

CASES = {
    "slow": Case(HEALTHY, line(0.3, 0.55), num=200),
    "fast": Case(HEALTHY, line(0.2, 0.8, 0, 0.2)),
    "steep end": Case(HEALTHY, line(0.1, 0.9, 0.8), evals=(), num=30, prompts=128),
    "steep end, long": Case(HEALTHY, line(0.1, 0.9, 0.8), evals=(0.0,), num=300, prompts=64),
    "last step best": Case(HEALTHY, line(0.05, 0.95, 0.5, 0.9), evals=(), num=15, prompts=64),
    "top": Case(SOLVED, line(0.35, 0.995, 0, 0.4)),
    "all right from the start": Case("These problems are solved", 0.995),
    "one evaluation": Case(HEALTHY, line(0.3, 0.7), evals=(0.0,)),
    "noise": Case(FLAT, 0.45, columns={"entropy": line(0.5, 0.42)}),
    "reward": Case(HEALTHY, line(0.1, 0.7), judged=False),
    "reward, no evaluation": Case(HEALTHY, line(0.1, 0.7), judged=False, evals=()),
    "reward, flat": Case(FLAT, 0.4, judged=False),
    "reward, fall": Case(COLLAPSED, line(0.7, 0.02, 0.4, 0.5), judged=False),
    "reward, fall, no evaluation": Case(COLLAPSED, line(0.7, 0.02, 0.4, 0.5), judged=False, evals=()),
    "all wrong": Case(WRONG, 0.0),
    "one in a thousand": Case(WRONG, 0.001),
    "paid alike": Case(
        "No reward variance: every answer is paid the same",
        columns={"reward": 0.5, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0},
    ),
    "alike": Case("No reward variance: the completions of a prompt are too much alike", spread=0.05),
    "rate too low": Case(TOO_LOW, 0.45, columns=STILL),
    "rate too high": Case(
        COLLAPSED, line(0.6, 0.0, 0.5, 0.52), columns={"entropy": line(0.5, 5.0, 0.5, 0.52)}
    ),
    "slow fall": Case(COLLAPSED, line(0.7, 0.1, 0.3, 0.9)),
    "some fell": Case("It was better before", line(0.3, 0.75, 0, 0.5),
                      lambda t: 0.3 + 0.9 * t if t <= 0.5 else 0.75 - 0.34 * (t - 0.5), num=100),
    "KL": Case("The policy has left its reference", columns={"kl": lambda t: 0.001 * 47000**t},
               config={"beta": 0.001}),
    "gradient": Case("The gradient norm has exploded", columns={"grad_norm": lambda t: 0.3 * 21000**t}),
    "all skipped": Case("No step had a finite loss and gradient",
                        columns={"skipped_steps": 1.0, "loss": float("nan"), "grad_norm": float("nan")}),
    "some skipped": Case(TOO_HIGH, columns={"skipped_steps": lambda t: float(round(t * 59) % 20 == 0)}),
    "lengths": Case(CUT, line(0.4, 0.33), columns={"completions/clipped_ratio": line(0.0, 0.8),
                                                 "completions/mean_length": line(150, 490)}),
    "entropy": Case("Entropy is gone: the policy has stopped exploring", line(0.3, 0.5),
                    columns={"entropy": line(0.5, 0.01, 0, 0.5)}),
    "form": Case("Format only: the reward rises, the answers do not get better", 0.3,
                 columns={"rewards/format/mean": line(0.1, 0.9), "reward": line(0.4, 1.2)},
                 config={"reward_funcs": ["accuracy", "format"]}),
    "only form": Case("Format only: nothing is paid for right answers", 0.3,
                      config={"reward_funcs": ["format"]}),
    "by heart": Case("It learns its training problems, not others", line(0.3, 0.88), 0.3,
                     columns={"epoch": line(0, 640)}),
    "logprobs": Case("Engine and trainer disagree about logprobs",
                     columns={"sampling/sampling_logp_difference/mean": 0.4}),
    "stale": Case("The samples are too old for the update", config={"async_rollouts": 1},
                  columns={"sampling/importance_sampling_clipped_ratio": 0.6,
                           "sampling/sampling_logp_difference/mean": 0.8}),
    "some scores fail": Case("Scoring failed on some answers", columns={"scoring_failures": 40.0}),
    "environment raises": Case("The environment failed in some episodes", 0.0,
                               columns={"episodes/failed_ratio": 0.95}),
    "environment fails at times": Case("The environment failed in some episodes", line(0.2, 0.25),
                                       columns={"episodes/failed_ratio": 0.2}),
    "reward raises": Case("Scoring failed on some answers", 0.0, columns={"scoring_failures": 256.0}),
    "dynamic sampling": Case("Dynamic sampling throws most samples away", 0.1,
                             columns={"dynamic_sampling/resample_ratio": 3.0, "frac_reward_zero_std": 0.1},
                             config={"dynamic_sampling": True}),
    "curriculum": Case("The curriculum is stuck", 0.3, config=SUMS,
                       columns={"curriculum/chain_sum/level": 2.0, "accuracy/chain_sum": 0.3}),
    "critic": Case("The critic harms: it is worse than a constant",
                   columns={"value_loss": 0.3, "explained_variance": -0.9}, config={"advantage": "gae"}),
    "critic, equal groups": Case(HEALTHY, line(0.2, 0.6), columns={"frac_reward_zero_std": 0.95},
                                 config={"advantage": "gae"}),
    "warm-up": Case("Too early to tell: the learning rate is still in its warm-up", 0.4, num=10, evals=(0.0,),
                    columns={**STILL, "learning_rate": line(0.0, 5e-7)}, config={"warmup_steps": 20}),
    "one step of warm-up": Case("Too early to tell: the learning rate is still in its warm-up", 0.4, num=1,
                                columns={"learning_rate": 0.0}, config={"warmup_ratio": 0.1}),
    "rate 0": Case("The learning rate is 0", columns={"learning_rate": 0.0}, config={"learning_rate": 0.0}),
    "one step": Case(FLAT, num=1),
    "imitation": Case(HEALTHY, line(0.3, 0.6), columns={**SFT, "entropy": line(0.5, 0.01)},
                      config={"loss_type": "sft"}),
    "bad imitation": Case("Imitation makes the answers worse", line(0.6, 0.3), columns=SFT,
                          config={"loss_type": "sft"}),
    "few keys": Case(HEALTHY, line(0.2, 0.7), columns=dict.fromkeys(
        ("reward_std", "frac_reward_zero_std", "entropy", "grad_norm", "learning_rate", "step_time"))),
    "masked": Case("Most tokens are left out of the loss",
                   columns={"masked_ratio/truncated_completions": 0.95}),
    "clipped": Case("Most of the update is clipped", columns={"clip_ratio/region_mean": 0.85}),
}  # fmt: skip


def watched(folder: Path) -> list[dict[str, str]]:
    return READERS["findings"](folder, 0)


@pytest.mark.parametrize("name", CASES)
def test_first_verdict(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = make_run(tmp_path, case, seed=sum(map(ord, name)))
    verdicts = explain(folder)
    assert verdicts[0].title == case.title, [v.title for v in verdicts]
    assert watched(folder)[0]["title"] == case.title
    assert write_report(folder).stat().st_size > 0
    titles = [verdict.title for verdict in verdicts]
    assert TOO_LOW not in titles[1:]  # beside another trouble it would contradict it
    assert "raises" not in name or WRONG not in titles
    if not case.judged:  # nothing is told of an accuracy that nobody measured
        assert not any("ccuracy" in v.evidence for v in verdicts)


def test_numbers_of_a_reward(tmp_path: Path) -> None:
    fall = explain(make_run(tmp_path / "fall", CASES["reward, fall, no evaluation"]))[0].evidence
    best, last = (float(number) for number in re.findall(r"(?:was|is) ([0-9.]+) ", fall)[:2])
    assert 0.6 < best < 0.8 and 0.0 < last < 0.05 and fall.startswith("Reward in training was 0.")
    rise = explain(make_run(tmp_path / "rise", CASES["reward"]))[0].evidence
    found = re.search(r"Reward on the evaluation problems is ([0-9.]+), \+([0-9.]+) since the start", rise)
    assert found and 0.6 < float(found[1]) < 0.8 and 0.5 < float(found[2]) < 0.7
    seen = explain(make_run(tmp_path / "seen", CASES["by heart"]))[0].evidence
    assert re.search(r"seen 6[0-9]{2} times", seen)


def test_a_run_that_was_cut_off_and_resumed(tmp_path: Path) -> None:
    folder = make_run(tmp_path, CASES["slow"])
    whole = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(whole[: len(whole) * 4 // 5])  # ends in the middle of a line
    (folder / "run.json").write_text(json.dumps({"sessions": [{"resumed_from_step": 50}, {}]}))
    assert explain(folder)[0].title == HEALTHY
    assert write_report(folder).is_file() and watched(folder)[0]["title"] == HEALTHY


def test_folders_without_a_step(tmp_path: Path) -> None:
    """Empty, and of an evaluation alone: a sentence from `explain`, and a report of what is there."""
    (tmp_path / "empty").mkdir()
    folder = make_run(tmp_path / "evaluated", Case(FLAT, num=0, evals=(0.0,)))
    for each in (tmp_path / "empty", folder):
        with pytest.raises(UserError, match="no training step"):
            explain(each)
        assert watched(each) == []
    assert write_report(folder).is_file()


def history(rng: np.random.Generator) -> tuple[list[dict], list[dict], dict]:
    """Rises, falls, spikes, NaN and missing keys, 1 to 300 rows, in any combination."""
    keys = [*train_row(CASES["slow"], 0, rng), "kl", "epoch", "value_loss", "explained_variance", "beta"]
    keys += ["dynamic_sampling/resample_ratio", "curriculum/chain_sum/level", "accuracy/chain_sum"]
    num = int(rng.integers(1, 301)) if rng.random() < 0.7 else int(rng.integers(1, 8))
    rows: list[dict[str, Any]] = [{"step": i + 1, "kind": "train"} for i in range(num)]
    for key in keys[2:]:
        start, end, spike = rng.choice(
            [0.0, 0.3, 0.9, 1.0, 1e3, 1e300], 3, p=[0.25, 0.25, 0.2, 0.2, 0.05, 0.05]
        )
        jump, missing, nan = rng.integers(0, num), *rng.choice([0.0, 0.1, 1.0], 2, p=[0.8, 0.15, 0.05])
        x = np.arange(num)
        shape = [x / num, x >= jump, x % 2, rng.random(num)][rng.integers(0, 4)]
        values = start + (end - start) * shape
        values[jump] = spike if rng.random() < 0.3 else values[jump]
        values = np.minimum(1.0, values) if key.startswith("accuracy") else values
        is_missing, is_nan = rng.random((2, num)) < [[missing], [nan]]
        for i, row in enumerate(rows):
            if not is_missing[i]:
                row[key] = None if is_nan[i] else float(values[i])
    evals = []
    for step in sorted(rng.integers(0, num + 1, size=rng.integers(0, 5)).tolist()):
        row: dict[str, Any] = {"step": step, "kind": "eval"}
        for key in ("accuracy", "reward"):
            share = float(rng.random())
            row |= {key: share, f"{key}_low": share * 0.9, f"{key}_high": share * 1.1}
        row |= {"delta_vs_step0": float(rng.normal()), "delta_vs_step0_p": float(rng.random())}
        evals.append(
            {key: value for key, value in row.items() if key in ("step", "kind") or rng.random() < 0.9}
        )
    config = {
        key: value for case in CASES.values() for key, value in case.config.items() if rng.random() < 0.2
    }
    return rows, evals, {"max_steps": num, "num_generations": int(rng.choice([2, 8])), **config}


def test_no_history_crashes_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    for number in range(300):
        rows, evals, config = history(rng)
        assert diagnose(rows, evals, config)
        if number % 30:
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.yaml").write_text(json.dumps(config))
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, (*rows, *evals))))
        assert explain(folder) and watched(folder) and write_report(folder).is_file()
