"""The Python API (docs/python.md): `train`, `steps`, `evaluate`, `sample`, `load_config` and `Run`."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from whetstone.config import Config, LoadedConfig, load
from whetstone.engines.packages import check_packages
from whetstone.errors import UserError
from whetstone.inference.answers import Answer
from whetstone.inference.conversation import Conversation
from whetstone.inference.prompts import Prompt
from whetstone.inference.sampler import Sampler
from whetstone.report import write_report
from whetstone.rewards.source import spec_of
from whetstone.run.folder import run_dir
from whetstone.run.metrics import read_rows
from whetstone.run.sft_start import start_from_sft
from whetstone.train import Step, evaluate_only, finish, loop, open_training, save
from whetstone.train import train as run_training

RewardFunc = str | Callable[..., Any]


@dataclass(frozen=True)
class Run:
    """A finished training run: `Run("outputs/quickstart")`."""

    folder: str | Path

    @cached_property
    def results(self) -> dict[str, Any]:
        """train_results.json: accuracy before and after."""
        return json.loads(self._file("train_results.json").read_text(encoding="utf-8"))

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: `kind` is train or eval. docs/metrics.md explains the names."""
        return read_rows(self._file("metrics.jsonl"))

    @cached_property
    def report(self) -> Path:
        """The path of the HTML report."""
        return write_report(Path(self.folder))

    def model(self) -> Any:
        """The trained model, loaded with transformers."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self._file("final_model"))

    def export(self, output: str | Path | None = None, **options: Any) -> Path:
        """Export like `whet export` with `dtype`, `gguf` (a list), `max_shard_size`; returns the folder."""
        from whetstone.export.folder import export
        from whetstone.run.source import find_source

        source = find_source(str(self.folder))
        return export(source, None if output is None else Path(output), **options).folder

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._file("final_model"))

    def sampler(self, *, device: str = "auto") -> Sampler:
        """The trained model on the native engine: `sample`, `sample_batch`, `stream`, `inspect`."""
        return Sampler.open(self.folder, device=device)

    def chat(self, *, system: str | None = None, seed: int = 0, **settings: Any) -> Conversation:
        """A conversation with the trained model: `ask` and `stream`. `settings` are those of `sample`."""
        return Conversation(self.sampler(), system=system, seed=seed, **settings)

    def _file(self, name: str) -> Path:
        path = Path(self.folder) / name
        if not path.exists():
            raise UserError(f"There is no {name} in {self.folder}: give the folder of a finished run.")
        return path


def load_config(source: str | None = None, **settings: Any) -> Config:
    """The configuration of a YAML file or recipe, with settings in place of its own."""
    return _load(source, settings).config


def train(
    source: str | None = "quickstart", *, reward_funcs: Sequence[RewardFunc] | None = None, **settings: Any
) -> Run:
    """Train like `whet train source key=value ...`. `UserError` for input that cannot work."""
    loaded = _load(source, settings, reward_funcs)
    run_training(loaded)
    return Run(run_dir(loaded.config))


def steps(
    source: str | None = "quickstart", *, reward_funcs: Sequence[RewardFunc] | None = None, **settings: Any
) -> Iterator[Step]:
    """Train step by step: `for step in steps(...)`. Leaving the loop early saves a checkpoint."""
    loaded = _load(source, settings, reward_funcs)
    if loaded.config.run.trainer != "whetstone" or loaded.config.evaluation.eval_only:
        raise UserError(
            "whetstone.steps goes through our own training: set trainer=whetstone, eval_only=false."
        )
    if loaded.config.update.sft_steps:
        loaded = start_from_sft(loaded, run_training)
    with open_training(loaded) as (run, step, started_at):
        try:
            for done in loop(run, step, started_at):
                step = done.step
                yield done
        except GeneratorExit:
            save(run, step, time.monotonic() - started_at)
            raise
        finish(run, step, time.monotonic() - started_at)


def evaluate(source: str | None = "quickstart", **settings: Any) -> dict[str, Any]:
    """Evaluate like `whet eval source key=value ...`; returns the summary."""
    return evaluate_only(_load(source, {**settings, "eval_only": True}))


def sample(
    source: str | Path, prompt: Prompt, n: int = 1, *, device: str = "auto", **settings: Any
) -> list[Answer]:
    """`n` answers like `whet sample source`. `settings`: system, seed, temperature, top_p, max_tokens ..."""
    return Sampler.open(source, device=device).sample(prompt, n, **settings)


def _load(
    source: str | None, settings: dict[str, Any], reward_funcs: Sequence[RewardFunc] | None = None
) -> LoadedConfig:
    if reward_funcs is not None:
        known = {key: value for key, value in settings.items() if key != "reward_weights"}  # one for each
        folder = Path(_load(source, known).config.run.output_dir) / "reward_funcs"
        specs = [entry if isinstance(entry, str) else spec_of(entry, folder) for entry in reward_funcs]
        settings = {**settings, "reward_funcs": specs}
    loaded = load(source, [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()])
    check_packages(loaded.config)
    return loaded
