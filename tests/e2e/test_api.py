"""The Python API: reward functions of a notebook, and steps. tests/docs/test_python.py runs the rest."""

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import whetstone
from whetstone.errors import UserError
from whetstone.rewards.custom import load
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
    rewards = [fmean([half(len(text))]) for text in completions]
    return rewards


def stuck(completions, **kwargs):
    return [handle.fileno() for _ in completions]


handle = open(__file__)
rewards = handle  # of the script: the function has its own
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


def test_a_function_of_a_package_is_named_by_its_module(tmp_path: Path) -> None:
    """By its file it could not import from its package."""
    rewards = pytest.importorskip("trl.rewards")
    spec = spec_of(rewards.think_format_reward, tmp_path)
    assert spec == "trl.rewards.format_rewards:think_format_reward"
    completions = [
        [{"role": "assistant", "content": "<think>a</think>b"}],
        [{"role": "assistant", "content": "b"}],
    ]
    assert load(spec)(completions) == [1.0, 0.0]


def test_functions_that_cannot_be_sent_are_refused(tmp_path: Path) -> None:
    for function in (lambda completions: [], main_function(tmp_path, "stuck"), len):
        with pytest.raises(UserError, match=r"'my_file\.py:name'"):
            spec_of(function, tmp_path)


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, whetstone; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    with pytest.raises(AttributeError):
        whetstone.no_such_name  # noqa: B018


def test_settings_are_keyword_arguments() -> None:
    assert whetstone.load_config("quickstart", max_steps=7).update.max_steps == 7
    with pytest.raises(UserError, match=r"'max_step' \(argument, did you mean 'max_steps'"):
        whetstone.load_config("quickstart", max_step=7)
    config = whetstone.load_config(
        developer_prompt="\U0001f600 {", max_steps=np.int64(3), dtype=torch.bfloat16
    )
    assert (config.tasks.developer_prompt, config.update.max_steps) == ("\U0001f600 {", 3)
    assert config.model.bf16


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
    words = {"output_dir": tmp_path, "datasets": {"chain_sum": {}}, "reward_weights": [2.0]}
    config = whetstone.load_config(None, **words, reward_funcs=["accuracy"])
    assert (config.tasks.reward_funcs, config.tasks.reward_weights) == (["accuracy"], [2.0])
