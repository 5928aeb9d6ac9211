"""`whet explain`: real runs that go wrong in known ways, and the verdicts on them; the verdicts that need a
longer run are checked on rows written by hand.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from whetstone.__main__ import run
from whetstone.config import load
from whetstone.diagnosis.explain import diagnose, load_history
from whetstone.diagnosis.history import Diagnosis, Severity
from whetstone.train import train

EASY = "datasets={chain_sum: {config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}}"
HARD = "datasets={chain_sum: {config: {min_terms: 6, max_terms: 6, min_digits: 6, max_digits: 6}}}"
TINY = [
    "prompts_per_step=2",
    "num_generations=4",
    "max_steps=3",
    "max_completion_length=32",
    "eval_num_samples=8",
    "eval_num_examples_to_print=0",
    "eval_greedy=false",
    "save_strategy='no'",
    "reward_workers=1",
    "preflight=off",
]

Explained = Callable[..., list[Diagnosis]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small is slower on two threads than on one, and three times so where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def explained(place: Path) -> Explained:
    """Train with some settings, once for all tests that ask for the same, and say what went wrong."""
    done: dict[tuple[str, ...], list[Diagnosis]] = {}

    def make(*words: str) -> list[Diagnosis]:
        if words not in done:
            name = f"run{len(done)}"
            train(load("quickstart", [EASY, *TINY, f"output_dir={place}", f"run_name={name}", *words]))
            done[words] = diagnose(*load_history(place / name))
        return done[words]

    return make


def titles(verdicts: list[Diagnosis]) -> list[str]:
    return [verdict.title for verdict in verdicts]


# --- real runs ---


def test_a_learning_rate_of_zero(explained: Explained) -> None:
    first = explained("learning_rate=0")[0]
    assert first.title == "The learning rate is 0"
    assert first.severity is Severity.GRAVE and "learning_rate" in first.remedy


def test_completions_that_are_all_cut_off(explained: Explained) -> None:
    first = explained("max_completion_length=3")[0]
    assert first.title == "Most completions are cut off"
    assert re.search(r"100 %.*max_completion_length \(3\)", first.evidence)
    assert "max_completion_length" in first.remedy


def test_a_constant_reward(explained: Explained, tmp_path: Path) -> None:
    (tmp_path / "pay.py").write_text(
        "def alike(completions, **columns):\n    return [0.5] * len(completions)\n"
    )
    first = explained(f"reward_funcs=[{tmp_path / 'pay.py'}:alike]")[0]
    assert first.title == "No reward variance: every answer is paid the same"
    assert "Only 0 % of the recent prompts" in first.evidence
    assert re.search(r"0\.5 .* 0, .* 0, .* 0", first.evidence)
    assert "reward_funcs" in first.remedy


@pytest.mark.slow  # the rows of test_verdicts_stand_in_the_order_of_their_weight have it, too
def test_problems_that_are_too_hard(explained: Explained) -> None:
    first = explained(HARD)[0]
    assert first.title == "No reward variance: all answers are wrong"
    assert "accuracy in training 0 %" in first.evidence
    assert "easier" in first.remedy and "num_generations" in first.remedy


def test_a_reward_for_form_alone(explained: Explained) -> None:
    first = explained("reward_funcs=[format]")[0]
    assert first.title == "Format only: nothing is paid for right answers"
    assert "reward_funcs=[accuracy,format]" in first.remedy


def test_a_learning_rate_that_ruins_the_model(explained: Explained) -> None:
    verdicts = explained("learning_rate=0.05", "max_steps=4", "eval_num_samples=30")
    assert titles(verdicts)[:2] == ["It collapsed", "The learning rate is too high"]
    collapse, rate = verdicts[:2]
    assert re.search(r" 0 % .*step 2\b", collapse.evidence)
    assert "0.005 instead of 0.05" in rate.remedy
    # What the collapse left behind is not put forward as a trouble of its own.
    later = [verdict for verdict in verdicts if verdict.title.startswith("No reward variance")]
    assert all(
        verdict.severity is Severity.NOTE and "since the collapse" in verdict.title for verdict in later
    )


def test_the_verb_prints_title_evidence_and_remedy(
    explained: Explained, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explained("learning_rate=0")
    capsys.readouterr()
    assert run(["explain", str(next(place.iterdir()))]) == 0
    text = capsys.readouterr().out
    assert text.startswith("1. ") and "What to do" in text
    assert run(["explain", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run(["explain", str(tmp_path / "empty")]) == 2
    assert str(tmp_path / "empty") in capsys.readouterr().err


# --- rows by hand ---

CONFIG = {
    "prompts_per_step": 16,
    "num_generations": 8,
    "reward_funcs": ["accuracy", "format"],
    "max_completion_length": 512,
    "epsilon": 0.2,
}
GOOD = {
    "loss": 0.01, "grad_norm": 0.5, "learning_rate": 1e-6, "entropy": 0.5, "clip_ratio/region_mean": 0.0,
    "reward": 0.5,
    "reward_std": 0.4, "accuracy": 0.5, "completions/mean_length": 100.0, "completions/max_length": 300.0,
    "completions/clipped_ratio": 0.0,
    "scoring_failures": 0.0, "skipped_steps": 0.0, "frac_reward_zero_std": 0.4,
    "sampling/sampling_logp_difference/mean": 1e-6,
}  # fmt: skip


def rows(num: int = 20, **changes: Any) -> list[dict[str, Any]]:
    """Rows of a good run; a change is a number, or a function of the progress from 0 to 1."""
    made = []
    for i in range(num):
        entries = {key: value(i / (num - 1)) if callable(value) else value for key, value in changes.items()}
        # Something always moves a little in a run that learns.
        made.append({"step": i + 1, "kind": "train", **GOOD, "entropy": 0.5 - 0.2 * i / num, **entries})
    return made


def evals(*accuracies: float, p_value: float = 0.001, every: int = 10) -> list[dict[str, Any]]:
    made = []
    for i, share in enumerate(accuracies):
        row = {
            "step": i * every,
            "accuracy": share,
            "accuracy_low": share - 0.05,
            "accuracy_high": share + 0.05,
        }
        if i:
            row |= {"delta_vs_step0": share - accuracies[0], "delta_vs_step0_p": p_value}
        made.append(row)
    return made


def test_healthy_run_and_its_loss_are_explained() -> None:
    verdicts = diagnose(rows(), evals(0.4, 0.5, 0.6), CONFIG)
    assert titles(verdicts) == ["Healthy: it learns", "A loss near 0 is normal here"]
    assert "60 %, +20.0 points since the start" in verdicts[0].evidence
    assert "ratio is 1" in verdicts[1].evidence and "0 in every group" in verdicts[1].evidence
    flat = diagnose(rows(loss=0.3), evals(0.4, 0.41, p_value=0.8), CONFIG)
    assert titles(flat) == ["Nothing is wrong, but no gain beyond chance yet"]
    # Several updates a batch: the loss is no longer 0 by construction, and nothing is said of it.
    several = diagnose(rows(), evals(0.4, 0.6), CONFIG | {"num_iterations": 2})
    assert titles(several) == ["Healthy: it learns"]


def test_a_critic_needs_no_variance_within_a_prompt() -> None:
    alone = CONFIG | {"num_generations": 1, "advantage": "gae"}
    verdicts = diagnose(rows(loss=0.3, frac_reward_zero_std=1.0), evals(0.4, 0.6), alone)
    assert titles(verdicts) == ["Healthy: it learns"]


@pytest.mark.parametrize(
    ("changes", "title", "number", "setting"),
    [
        ({"clip_ratio/region_mean": 0.9}, "Most of the update is clipped", "90 %", "learning_rate"),
        ({"completions/clipped_ratio": 0.3}, "Many completions are cut off", "30 %", "max_completion_length"),
        ({"scoring_failures": 1.0}, "Scoring failed on some answers", "20 answers", "reward_timeout_s"),
        ({"skipped_steps": 0.1}, "The learning rate is too high", "2 steps", "learning_rate"),
        ({"sampling/sampling_logp_difference/mean": 0.3},
         "Engine and trainer disagree about logprobs", "0.3", "bf16"),
        ({"entropy": lambda t: 0.5 * (1 - t) ** 3}, "Entropy is gone: the policy has stopped exploring",
         "0.5", "epsilon_high"),
        ({"masked_ratio/truncated_completions": 0.95}, "Most tokens are left out of the loss", "95 %",
         "mask_truncated_completions"),
        ({"frac_reward_zero_std": 0.95, "accuracy": 0.99},
         "The training problems are solved, those of the evaluation are not", "99 %", "datasets"),
        ({"frac_reward_zero_std": 1.0}, "No reward variance: the completions of a prompt are too much alike",
         "50 %", "temperature"),
        ({"entropy": 0.5}, "The learning rate is too low", "1e-06", "learning_rate"),
    ],
)  # fmt: skip
def test_one_trouble_one_verdict(changes: dict[str, Any], title: str, number: str, setting: str) -> None:
    verdicts = diagnose(rows(loss=0.3, **changes), evals(0.5, 0.5, p_value=1.0), CONFIG)
    first = verdicts[0]
    assert first.title == title
    assert number in first.evidence and setting in first.remedy
    grave_or_warned = [verdict for verdict in verdicts if verdict.severity is not Severity.NOTE]
    assert len(grave_or_warned) <= 1


def test_success_comes_first_and_nothing_contradicts_it() -> None:
    """The quickstart: accuracy rises to 99 %, and no variance is left."""
    learns = rows(
        accuracy=lambda t: min(1.0, 0.3 + 1.5 * t), frac_reward_zero_std=lambda t: 1 - 0.5 * (t < 0.5)
    )
    verdicts = diagnose(learns, evals(0.35, 0.95, 0.99), CONFIG)
    assert titles(verdicts)[0] == "It learned to solve these problems"
    assert "+64.0 points" in verdicts[0].evidence and "0 % of the recent prompts" in verdicts[0].evidence
    assert {verdict.severity for verdict in verdicts} == {Severity.NOTE}
    assert not any("more steps" in verdict.remedy for verdict in verdicts)
    # A trouble stands before it still.
    cut = diagnose([row | {"completions/clipped_ratio": 0.3} for row in learns], evals(0.35, 0.99), CONFIG)
    assert titles(cut)[:2] == ["Many completions are cut off", "It learned to solve these problems"]


@pytest.mark.parametrize("is_set", [False, True])
def test_no_advice_to_set_what_is_set(is_set: bool) -> None:
    config = CONFIG | {"mask_truncated_completions": is_set}
    cut: dict[str, Any] = {"completions/clipped_ratio": 0.3}
    first = diagnose(rows(**cut), evals(0.5, 0.5, p_value=1.0), config)[0]
    assert first.title == "Many completions are cut off"
    assert ("mask_truncated_completions" in first.remedy) != is_set


def test_a_reward_that_rises_by_its_form() -> None:
    changes: dict[str, Any] = {
        "rewards/format/mean": lambda t: 0.2 + 0.7 * t,
        "reward": lambda t: 0.7 + 0.7 * t,
    }
    first = diagnose(rows(**changes), evals(0.5, 0.51, p_value=0.7), CONFIG)[0]
    assert first.title == "Format only: the reward rises, the answers do not get better"
    assert "+1.0 points to 51 %" in first.evidence and "reward_weights" in first.remedy
    assert "Healthy: it learns" in titles(diagnose(rows(**changes), evals(0.5, 0.9), CONFIG))


def test_when_it_collapsed_and_what_happened_on_the_way() -> None:
    """Evaluations every 10 steps say between 20 and 30; training says 25."""
    made = rows(40, loss=0.3)
    for row in made:
        if row["step"] >= 25:
            row |= {"accuracy": 0.1, "reward": 0.1, "entropy": 4.0, "completions/mean_length": 500.0}
        if row["step"] == 24:
            row["grad_norm"] = 30.0
    verdicts = diagnose(made, evals(0.4, 0.6, 0.65, 0.1, 0.1), CONFIG)
    assert titles(verdicts) == ["It collapsed", "The learning rate is too high"]
    assert re.search("65 %.*step 20.*10 %.*step 25", verdicts[0].evidence)
    assert "length 100 -> 500" in verdicts[0].evidence
    assert re.search(r" 30.* 0\.5", verdicts[1].evidence)
    # Without evaluations the training rows are enough; noise alone is no collapse.
    assert titles(diagnose(made, [], CONFIG))[0] == "It collapsed"
    wobbly = rows(40, loss=0.3, accuracy=lambda t: 0.5 + 0.06 * (-1) ** round(39 * t))
    assert "It collapsed" not in titles(diagnose(wobbly, [], CONFIG))


def test_verdicts_stand_in_the_order_of_their_weight() -> None:
    changes: dict[str, Any] = {"completions/clipped_ratio": 0.3, "frac_reward_zero_std": 1.0, "accuracy": 0.0}
    made = rows(loss=0.0, **changes)
    verdicts = diagnose(made, evals(0.0, 0.0, p_value=1.0), CONFIG)
    assert [verdict.severity for verdict in verdicts] == sorted(verdict.severity for verdict in verdicts)
    assert titles(verdicts)[:2] == [
        "No reward variance: all answers are wrong",
        "Many completions are cut off",
    ]


# --- the parts that not every run has ---


def first_of(changes: dict[str, Any], config: dict[str, Any], num: int = 20) -> Diagnosis:
    verdicts = diagnose(rows(num, loss=0.3, **changes), evals(0.5, 0.5, p_value=1.0), CONFIG | config)
    assert sum(verdict.severity is not Severity.NOTE for verdict in verdicts) <= 1
    return verdicts[0]


GAE = {"advantage": "gae", "critic_learning_rate": 1e-5}
AHEAD = {"async_rollouts": 1, "importance_correction_max": 3.0}
ENTROPY = {"entropy_target": 0.6, "entropy_coef_max": 0.2}
ADAPTIVE = {"beta": 0.01, "target_kl": 0.02}
HELD_UP = {
    "completions/mean_length": 50.0, "completions/max_length": 900.0, "time/rollout": 7.0, "step_time": 9.0
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "config", "title", "number", "setting"),
    [
        ({"value_loss": 0.2, "explained_variance": -0.8}, GAE,
         "The critic harms: it is worse than a constant", "-80 %", "critic_learning_rate"),
        ({"value_loss": 0.2, "explained_variance": 0.02}, GAE, "The critic does not learn", "0.2 to 0.2",
         "critic_warmup_steps"),
        ({"dynamic_sampling/resample_ratio": 2.5, "accuracy": 0.2}, {"dynamic_sampling": True},
         "Dynamic sampling throws most samples away", "71.4 %", "easier"),
        ({"kl": 0.0}, {"beta": 0.1, "kl_reference": "rollout"}, "The local KL has no effect", "one update",
         "num_iterations"),
        ({"entropy_coef": 0.2, "entropy": lambda t: 0.5 - 0.1 * t}, ENTROPY,
         "The entropy bonus is at its bound", "0.2", "entropy_coef_max"),
        ({"entropy": lambda t: 0.5 + 4 * t}, {"entropy_coef": 0.02}, "The answers become noise",
         "from 0.5 to",
         "Lower entropy_coef tenfold (it is 0.02)"),
        ({"entropy": lambda t: 0.5 + 4 * t}, {}, "The answers become noise", "from 0.5 to",
         "Lower learning_rate"),
        (HELD_UP, {"max_completion_length": 900}, "Batches wait for their longest completion", "77.8 %",
         "max_completion_length (900)"),
        ({"beta": 0.4, "kl": 0.09}, ADAPTIVE, "The adaptive beta can't hold the KL", "0.01 to 0.4",
         "target_kl"),
        ({"sampling/importance_sampling_clipped_ratio": 0.7, "sampling/sampling_logp_difference/mean": 0.9},
         AHEAD,
         "The samples are too old for the update", "70 %", "async_rollouts=0"),
        ({"curriculum/sums/level": 2.0, "accuracy/sums": 0.4},
         {"datasets": {"sums": {"curriculum": {"window": 128, "up": 0.8}}}}, "The curriculum is stuck",
         "level 2 for 20 steps; 40 %", "lower `up`"),
        ({"curriculum/sums/level": 2.0, "accuracy/sums": 0.02},
         {"datasets": {"sums": {"curriculum": {"window": 128, "up": 0.8}}}}, "The curriculum is stuck",
         "2 %", "lower start"),
    ],
)  # fmt: skip
def test_one_trouble_of_a_part_one_verdict(
    changes: dict[str, Any], config: dict[str, Any], title: str, number: str, setting: str
) -> None:
    first = first_of(changes, config)
    assert first.title == title
    assert number in first.evidence and setting in first.remedy


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({"value_loss": lambda t: 0.3 - 0.2 * t, "explained_variance": 0.4}, GAE),
        ({"dynamic_sampling/resample_ratio": 0.6}, {"dynamic_sampling": True}),
        ({"kl": 0.01}, {"beta": 0.1, "kl_reference": "rollout", "num_iterations": 2}),
        ({"entropy_coef": 0.2, "entropy": lambda t: 0.9 - 0.1 * t}, ENTROPY),
        ({"entropy": lambda t: 0.3 + 0.6 * t}, {"entropy_coef": 0.02}),
        (HELD_UP | {"completions/mean_length": 300.0}, {}),
        (HELD_UP, {"async_rollouts": 1}),
        ({"beta": 0.4, "kl": 0.02}, ADAPTIVE),
        ({"sampling/importance_sampling_clipped_ratio": 0.01, "sampling/sampling_logp_difference/mean": 0.1},
         AHEAD),
        ({"curriculum/sums/level": lambda t: round(5 * t), "accuracy/sums": 0.7},
         {"datasets": {"sums": {"curriculum": {"window": 128, "up": 0.8}}}}),
    ],
)  # fmt: skip
def test_a_part_that_does_its_work_is_left_alone(changes: dict[str, Any], config: dict[str, Any]) -> None:
    assert first_of(changes, config).severity is Severity.NOTE


def test_real_runs_of_these_parts(explained: Explained) -> None:
    words = ("beta=0.1", "kl_reference=rollout", "entropy_target=9", "entropy_coef_max=0.005", "max_steps=1")
    found = titles(explained(*words, "eval_num_samples=0"))
    assert {"The local KL has no effect", "The entropy bonus is at its bound"} <= set(found)
    old = explained(
        "async_rollouts=1", "learning_rate=0.05", "importance_correction_max=1.01", "eval_num_samples=0"
    )
    assert "The samples are too old for the update" in titles(old)


def test_learned_by_heart_needs_an_evaluation_that_could_tell() -> None:
    wide = CONFIG | {"prompts_per_step": 64}
    rising = rows(60, loss=0.3, accuracy=lambda t: 0.2 + 0.5 * t)
    title = "It learns its training problems, not others"
    assert title in titles(diagnose(rising, evals(0.2, 0.22, p_value=0.6), wide))
    assert title not in titles(diagnose(rising, evals(0.2, 0.35), wide))  # it rose
    assert title not in titles(diagnose(rising, evals(0.2, 0.35, p_value=0.1), wide))  # it may have
    assert title not in titles(diagnose(rising, evals(0.9, 0.91, p_value=0.6), wide))  # easier problems


def test_supervised_runs_are_compared_with_start_and_best() -> None:
    config = CONFIG | {"loss_type": "sft"}
    steps = [{"step": i + 1, "kind": "train", "loss": 1.0, "entropy": 0.9**i} for i in range(20)]
    worse = diagnose(steps, evals(0.6, 0.4, 0.3), config)
    assert titles(worse) == ["Imitation makes the answers worse"]
    later = diagnose(steps, evals(0.1, 0.6, 0.3), config)
    assert titles(later) == ["It was better before"] and "take fewer steps" in later[0].remedy
    assert titles(diagnose(steps, evals(0.1, 0.5, 0.6), config)) == ["Healthy: it learns"]


@pytest.mark.parametrize(
    ("keys", "difference", "is_told"),
    [({}, 0.03, True), ({"bf16": True}, 0.03, False), ({"bf16": True}, 0.06, True),
     ({"top_p": 0.9}, 0.1, False), ({"top_p": 0.9}, 0.13, True), ({"top_k": 20}, 0.3, False)],
)  # fmt: skip
def test_unexplained_difference_of_engine_and_trainer(
    keys: dict[str, Any], difference: float, is_told: bool
) -> None:
    changes: dict[str, Any] = {"loss": 0.3, "sampling/sampling_logp_difference/mean": difference}
    steps = rows(**changes)
    told = titles(diagnose(steps, evals(0.4, 0.6), CONFIG | keys))
    assert ("Engine and trainer disagree about logprobs" in told) == is_told
