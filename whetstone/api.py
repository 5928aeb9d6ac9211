"""The Python API (docs/python.md): `train`, `steps`, `evaluate`, `sample`, `load_config` and `Run`; and TRL's
`GRPOTrainer` and `GRPOConfig` over them. Rows and functions in memory are written into files first.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import EllipsisType, FunctionType, SimpleNamespace
from typing import Any

from whetstone.config import Config, LoadedConfig, load
from whetstone.engines.packages import check_packages
from whetstone.errors import UserError
from whetstone.files import atomic_write
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

Source = str | EllipsisType | None  # `...`: the recipe quickstart, or the defaults where data are given
DATA = {"train_dataset", "eval_dataset"}
# TRL's defaults, where ours would train something else.
TRL_DEFAULTS = {"num_train_epochs": 3.0, "bf16": True, "vllm_importance_sampling_correction": True}
UNSUPPORTED = {
    "reward_processing_classes": "no reward model is run: give functions as reward_funcs",
    "callbacks": "write the loop yourself, `for step in whetstone.steps(...)`",
    "optimizers": "set optim, learning_rate and lr_scheduler_type in args",
    "quantization_config": "set load_in_4bit=True in args, beside a peft_config",
}


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


class GRPOConfig(SimpleNamespace):
    """TRL's arguments, and ours. Those not given have TRL's defaults; an unknown one is refused."""

    def __init__(self, output_dir: str = "trainer_output", **settings: Any) -> None:
        chosen = {name: value for name, value in settings.items() if value is not None}
        super().__init__(**{**TRL_DEFAULTS, **chosen, "output_dir": output_dir})
        load_config(None, **vars(self))


class GRPOTrainer:
    """TRL's trainer over `train`. The run folder is `output_dir`; `save_model` copies its final_model."""

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: Any = None, train_dataset: Any = None, **others: Any
    ) -> None:
        for name in [name for name in UNSUPPORTED if others.pop(name, None) not in (None, (None, None))]:
            raise UserError(f"GRPOTrainer takes no {name}: {UNSUPPORTED[name]}.")
        if not isinstance(args, GRPOConfig | None):
            raise UserError("args: import GRPOConfig from whetstone, as GRPOTrainer.")
        others["chat_template"] = getattr(others.pop("processing_class", None), "chat_template", None)
        arguments = dict(others, model=model, reward_funcs=reward_funcs, train_dataset=train_dataset)
        first = next(iter(train_dataset), None) if isinstance(train_dataset, Iterable) else None
        if isinstance(first, Mapping) and isinstance(first.get("prompt"), str):  # a text is the whole prompt
            arguments.update(apply_chat_template=False, prompt_template="{question}", chat_template=None)
        if (adapter := arguments.pop("peft_config", None)) is not None:
            if isinstance(adapter, dict):
                raise UserError("peft_config is a dict: give a peft.LoraConfig.")
            usual = vars(type(adapter)()) | {"r": None, "lora_alpha": None}  # ours are not peft's
            arguments["lora"] = {name: value for name, value in vars(adapter).items() if value != usual[name]}
        few = {"eval_num_samples": 0} if others.get("eval_dataset") is None else {}
        arguments = {name: value for name, value in arguments.items() if value is not None}
        self.settings = {"preflight": "warn", **few, **vars(args or GRPOConfig()), **arguments}
        self.run = Run(Path(self.settings["output_dir"]) / self.settings.get("run_name", ""))

    def train(self, resume_from_checkpoint: str | bool | None = None) -> Run:
        return train(None, **{"resume_from_checkpoint": resume_from_checkpoint, **self.settings})

    def evaluate(self) -> dict[str, Any]:
        final = Path(self.run.folder) / "final_model"
        return evaluate(None, **self.settings, checkpoint_path=final if final.exists() else None)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        shutil.copytree(self.run._file("final_model"), output_dir or self.run.folder, dirs_exist_ok=True)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"GRPOTrainer of whetstone has no {name}: docs/python.md says what it has.")


def load_config(source: str | None = None, **settings: Any) -> Config:
    """The configuration of a YAML file or recipe, with settings in place of its own."""
    return _load(source, settings).config


def train(source: Source = ..., **settings: Any) -> Run:
    """Train like `whet train source key=value ...`, also on rows in memory (`train_dataset`)."""
    loaded = _load(source, settings)
    run_training(loaded)
    return Run(run_dir(loaded.config))


def steps(source: Source = ..., **settings: Any) -> Iterator[Step]:
    """Train step by step: `for step in steps(...)`. Leaving the loop early saves a checkpoint."""
    loaded = _load(source, settings)
    if loaded.config.evaluation.eval_only:
        raise UserError("whetstone.steps trains: set eval_only=false, or call whetstone.evaluate.")
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


def evaluate(source: Source = ..., **settings: Any) -> dict[str, Any]:
    """Evaluate like `whet eval source key=value ...`; returns the summary."""
    return evaluate_only(_load(source, {**settings, "eval_only": True}))


def sample(
    source: str | Path, prompt: Prompt, n: int = 1, *, device: str = "auto", **settings: Any
) -> list[Answer]:
    """`n` answers like `whet sample source`. `settings`: system, seed, temperature, top_p, max_tokens ..."""
    return Sampler.open(source, device=device).sample(prompt, n, **settings)


def _load(source: Source, settings: dict[str, Any]) -> LoadedConfig:
    data = DATA & settings.keys()
    if source is ...:
        source = None if data else "quickstart"
    if not isinstance(source, str | Path | None):
        raise UserError(f"source is a {type(source).__name__}: give a YAML file (rows: train_dataset).")
    names = {k: "rows" if k in DATA else str(settings[k]) for k in {*DATA, "output_dir"} & settings.keys()}
    folder = Path(load(source, names).config.run.output_dir)
    settings = {key: _plain(key, value, folder) for key, value in settings.items()}
    if data == {"eval_dataset"} and source is None:
        settings["eval_datasets"] = {"rows": {"config": {"path": settings.pop("eval_dataset")}}}
    loaded = load(source, settings)
    check_packages(loaded.config)
    return loaded


def _plain(key: str, value: Any, folder: Path) -> Any:
    """A setting as a configuration holds it. Rows are written into a file that is named by its content."""
    if key not in DATA or isinstance(value, str | Path | None):
        return json.loads(_json(key, value, folder))
    try:
        rows = [dict(row) for _, row in zip(range(len(value)), value, strict=False)]
    except (TypeError, ValueError):
        raise UserError(
            f"{key} is of type {type(value).__name__}: give a list of dicts, list(data) or data['train']."
        ) from None
    for number, row in enumerate(rows, 1):
        for name, cell in row.items():
            row[name] = json.loads(_json(f"{key}, row {number}, column {name}", cell, folder))
    if not rows:
        raise UserError(f"{key} has no rows: give some.")
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    path = folder / "datasets" / f"rows_{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    atomic_write(path, text, many_writers=True)
    return str(path)


def _json(what: str, value: Any, folder: Path) -> str:
    """JSON in which arrays and sets are lists, and functions are named by files in `folder`."""

    def other(entry: Any) -> Any:
        if isinstance(entry, FunctionType):
            return spec_of(entry, folder / "reward_funcs")
        if isinstance(entry, set) or hasattr(entry, "tolist"):
            return sorted(entry) if isinstance(entry, set) else entry.tolist()
        if isinstance(entry, Path) or type(entry).__name__ == "dtype":
            return str(entry)
        raise TypeError(
            f"{type(entry).__name__} can't go into a file: give text, numbers or a name (rows: train_dataset)"
        )

    try:
        return json.dumps(value, default=other)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what}: {str(error).rstrip('.')}.") from None
