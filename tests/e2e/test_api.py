"""The Python API: reward functions of a notebook, and steps. tests/docs/test_python.py runs the rest."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import whetstone
from whetstone.api import _load
from whetstone.errors import UserError
from whetstone.rewards.source import spec_of

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "max_steps": 2, "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 16,
    "reward_workers": 1, "eval_num_samples": 2, "preflight": "off",
}  # fmt: skip
SCRIPT = """
import math as mathematics
from statistics import fmean

SCALE = [2.0]


def half(length: int) -> float:
    return mathematics.floor(length) / SCALE[0]


def scored(completions: "list[str]", weight=SCALE, **kwargs):
    return [fmean([half(len(text))]) for text in completions]


def stuck(completions, **kwargs):
    return [handle.fileno() for _ in completions]


handle = open(__file__)
"""


def constant(completions, **kwargs):
    return [0.5 * position for position, _ in enumerate(completions)]


def main_function(folder: Path, name: str):
    """A function as a script or notebook has it: its module is `__main__`."""
    path = folder / "script.py"
    path.write_text(SCRIPT)
    return runpy.run_path(str(path), run_name="__main__")[name]


def test_a_function_of_a_script_is_written_with_what_it_uses(tmp_path: Path) -> None:
    path, _, name = spec_of(main_function(tmp_path, "scored"), tmp_path / "out").rpartition(":")
    assert runpy.run_path(path)[name](["abcd", "ab"]) == [2.0, 1.0]
    assert spec_of(main_function(tmp_path, "scored"), tmp_path / "out") == f"{path}:{name}"


def test_a_function_of_a_module_is_named_by_its_file(tmp_path: Path) -> None:
    assert spec_of(constant, tmp_path) == f"{Path(__file__)}:constant"


def test_functions_that_cannot_be_sent_are_refused(tmp_path: Path) -> None:
    for function in (lambda completions: [], main_function(tmp_path, "stuck"), len):
        with pytest.raises(UserError, match="reward_funcs"):
            spec_of(function, tmp_path)


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, whetstone; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    with pytest.raises(AttributeError):
        whetstone.no_such_name  # noqa: B018


def test_settings_are_keyword_arguments() -> None:
    assert whetstone.load_config("quickstart", max_steps=7).update.max_steps == 7
    with pytest.raises(UserError, match="max_steps"):
        whetstone.load_config("quickstart", max_step=7)


def test_steps_can_be_left_and_resumed(tmp_path: Path) -> None:
    settings = {**SMALL, "output_dir": tmp_path, "eval_strategy": "no"}
    whole = list(whetstone.steps("quickstart", run_name="whole", **settings))
    assert [step.step for step in whole] == [1, 2]
    sampled = [rollout for step in whole for group in step.groups for rollout in group.rollouts]
    assert len(sampled) == 2 * 2 * 2
    num_tokens = sum(len(rollout.prompt_ids) + len(rollout.completion.token_ids) for rollout in sampled)
    assert whole[-1].metrics["num_tokens"] == num_tokens

    for step in whetstone.steps("quickstart", run_name="left", **settings):
        assert step.step == 1
        break
    assert "Traceback" not in (tmp_path / "left" / "training.log").read_text()
    resumed = list(whetstone.steps("quickstart", run_name="left", auto_resume=True, **settings))
    assert [step.step for step in resumed] == [2]
    assert resumed[0].groups == whole[1].groups
    for name in ("loss", "grad_norm", "num_tokens", "clip_ratio/low_mean", "clip_ratio/high_mean"):
        assert resumed[0].metrics[name] == whole[1].metrics[name]
    rows = whetstone.Run(tmp_path / "left").metrics
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2]
    with pytest.raises(UserError):
        next(whetstone.steps("quickstart", eval_only=True))
    with pytest.raises(UserError):
        whetstone.Run(tmp_path).metrics  # noqa: B018


def test_weights_of_reward_functions_are_counted_with_these(tmp_path):
    words = {"output_dir": str(tmp_path), "datasets": {"chain_sum": {}}, "reward_weights": [2.0]}
    config = _load(None, words, ["accuracy"]).config
    assert (config.tasks.reward_funcs, config.tasks.reward_weights) == (["accuracy"], [2.0])
