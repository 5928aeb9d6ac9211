"""docs/course.md: the commands of its exercises run on the embedded model, and what the solution says is
checked on what they wrote.
"""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from tests.support.doc_commands import COURSE as PAGE
from whetstone.__main__ import run as whet
from whetstone.config import load, make_plan
from whetstone.errors import UserError
from whetstone.model.hub import resolve

Rows = dict[str, list[dict[str, Any]]]  # run -> rows of metrics.jsonl


@dataclass(frozen=True, kw_only=True)
class Exercise:
    commands: list[list[str]]  # without `whet`
    solution: str


def read_exercises() -> dict[int, Exercise]:
    part = PAGE[PAGE.index("## The directions") : PAGE.index("## The same run with TRL")]
    exercises = {}
    for number, title, body in re.findall(r"^### (\d)\. (.*?)\n(.*?)(?=^### |\Z)", part, re.M | re.S):
        _, _, rest = body.partition("<details><summary>Solution</summary>\n\n")
        solution, closed, after = rest.partition("\n\n</details>")
        assert closed and not after.strip() and "<details>" not in solution, title
        lines = [line for line in body.splitlines() if line.startswith("    whet ")]
        commands = [shlex.split(line)[1:] for line in lines]
        exercises[int(number)] = Exercise(commands=commands, solution=solution)
    return exercises


EXERCISES = read_exercises()


def series(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row["kind"] == "train"]


def check_groups(runs: Rows) -> None:
    small, large = (series(runs[name], "frac_reward_zero_std") for name in ("groups_of_4", "groups_of_16"))
    assert mean(large) < mean(small)


def check_batches(runs: Rows) -> None:
    one, all_ = runs["one_at_a_time"], runs["all_at_once"]
    key = "rollout_tokens_per_s"
    assert median(series(all_, key)) > 1.5 * median(series(one, key))
    for same in ("reward", "completions/mean_length"):  # a sample does not depend on its batch
        assert series(all_, same) == pytest.approx(series(one, same))


def check_format(runs: Rows) -> None:
    for key in ("rewards/format/mean", "accuracy"):
        values = series(runs["format_only"], key)
        assert mean(values[-3:]) > mean(values[:3]) + 0.1
    assert set(series(runs["strict"], "rewards/strict_format/mean")) <= {n / 32 for n in range(33)}


def check_local_kl(runs: Rows) -> None:
    assert set(series(runs["local_once"], "kl")) == {0.0}
    assert series(runs["local_twice"], "kl")[-1] > 0


def check_mask(runs: Rows) -> None:
    assert set(series(runs["mask_once"], "masked_ratio/off_policy")) == {0.0}
    assert max(series(runs["mask_often"], "masked_ratio/off_policy")) > 0


def check_critic(runs: Rows) -> None:
    losses = series(runs["critic"], "value_loss")
    assert mean(losses[-3:]) < mean(losses[:3])
    with pytest.raises(UserError, match="num_generations"):
        make_plan(load("course_cpu", ["num_generations=1"]).config, num_problems=100)


def check_intervals(runs: Rows) -> None:
    (few,), (many,) = runs.values()
    ratio = (few["high"] - few["low"]) / (many["high"] - many["low"])
    assert 2 < ratio < 5  # the square root of ten, about


CHECKS: dict[int, Callable[[Rows], None]] = {
    1: check_groups,
    2: check_batches,
    3: check_format,
    4: check_local_kl,
    5: check_mask,
    6: check_critic,
    7: check_intervals,
}


@pytest.mark.slow
@pytest.mark.parametrize("number", CHECKS)
def test_the_solution_says_what_the_commands_show(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exercise = EXERCISES[number]
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n# (\w+\.py)\n(.*?)```", exercise.solution, flags=re.DOTALL)
    if code is not None:
        Path(code[1]).write_text(code[2], encoding="utf-8")
    runs: Rows = {}
    for words in exercise.commands:
        extra = ["reward_workers=1", "preflight=off"] if words[0] == "train" else []
        if words[0] == "eval":  # of the run of the warm-up: its first model stands in for the last
            Path("outputs/course_cpu").mkdir(parents=True, exist_ok=True)
            if not Path("outputs/course_cpu/final_model").exists():
                Path("outputs/course_cpu/final_model").symlink_to(resolve("pebble"))
        assert whet([*words, *extra]) == 0
        name = next((word.partition("=")[2] for word in words if word.startswith("run_name=")), None)
        if name is not None:
            lines = Path("outputs", name, "metrics.jsonl").read_text().splitlines()
            runs[name] = [json.loads(line) for line in lines]
        else:
            (result,) = Path("outputs/course_cpu/evaluations/final_model").rglob("eval_step_0.json")
            runs[shlex.join(words)] = [json.loads(result.read_text())["summary"]["accuracy"]]
    CHECKS[number](runs)
