"""The Python API: `whetstone.train`, `whetstone.evaluate`, `whetstone.load_config`. docs/python.md shows it.

Reward functions given as Python callables run in the scoring processes, with their time limit, as those of
files do: rewards/source.py writes the source of a notebook's function to output_dir/reward_funcs.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from whetstone.config import Config, LoadedConfig, load
from whetstone.engines.packages import check_packages
from whetstone.report import write_report
from whetstone.rewards.source import spec_of
from whetstone.run.folder import run_dir
from whetstone.run.metrics import read_rows
from whetstone.train import evaluate_only
from whetstone.train import train as run_training

RewardFunc = str | Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished training run."""

    folder: Path
    results: dict[str, Any]  # train_results.json: accuracy before and after

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: `kind` is train or eval. docs/metrics.md explains the names."""
        return read_rows(self.folder / "metrics.jsonl")

    @cached_property
    def report(self) -> Path:
        """The path of the HTML report."""
        return write_report(self.folder)

    def model(self) -> Any:
        """The trained model, loaded with transformers."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder / "final_model")

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder / "final_model")


def load_config(source: str | None = None, **settings: Any) -> Config:
    """The configuration of a YAML file or recipe, with settings in place of its own."""
    return _load(source, settings).config


def train(
    source: str = "quickstart", *, reward_funcs: Sequence[RewardFunc] | None = None, **settings: Any
) -> Run:
    """Train like `whet train source key=value ...`. `UserError` for input that cannot work."""
    if reward_funcs is not None:
        folder = Path(_load(source, settings).config.run.output_dir) / "reward_funcs"
        settings["reward_funcs"] = [
            entry if isinstance(entry, str) else spec_of(entry, folder) for entry in reward_funcs
        ]
    loaded = _load(source, settings)
    return Run(folder=run_dir(loaded.config), results=run_training(loaded))


def evaluate(source: str = "quickstart", **settings: Any) -> dict[str, Any]:
    """Evaluate like `whet eval source key=value ...`; returns the summary."""
    return evaluate_only(_load(source, {**settings, "eval_only": True}))


def _load(source: str | None, settings: dict[str, Any]) -> LoadedConfig:
    loaded = load(source, [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()])
    check_packages(loaded.config)
    return loaded
