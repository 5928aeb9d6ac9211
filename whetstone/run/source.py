"""What a user's argument stands for: the model of a run, a checkpoint, a model folder, or a name."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whetstone.config import Config, build, load
from whetstone.errors import UserError
from whetstone.model.hub import PEBBLE, SMOLLM2
from whetstone.run.checkpoint import complete_checkpoints
from whetstone.run.record import read_mapping, read_sessions

FINAL = "final_model"
RUNS = Path("outputs")  # the default output_dir
MODEL_FILES = ("config.json", "adapter_config.json")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model, and the run that it belongs to."""

    name: str  # as the user wrote it
    weights: Path | None = None  # a folder of the run; None: the model of that name
    run: Path | None = None  # None: no run of ours
    step: int = 0  # optimizer steps of the run; 0: not trained by it

    @property
    def model(self) -> str:
        """The folder of the weights, or the name of the model."""
        return self.name if self.weights is None else str(self.weights)

    @property
    def title(self) -> str:
        """A short name for the model, without a path."""
        if self.run is None:
            return Path(self.model).name
        run = str(self.settings.get("run_name") or self.run.resolve().name)
        return run if self.is_final else f"{run}-{Path(self.model).name}"

    @property
    def is_final(self) -> bool:
        """Whether it is the model that the results of the run belong to."""
        return self.weights is not None and self.weights.name == FINAL

    @property
    def can_compare(self) -> bool:
        """Whether there is a model before training to compare with."""
        return self.run is not None and self.weights is not None

    @functools.cached_property
    def config(self) -> Config:
        """The configuration that it is used with: of its run, or the defaults."""
        if self.run is None:
            return build({"model_name_or_path": self.name})
        return load(self.run / "config.yaml").config

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """config.yaml of the run as it was written; empty where it is damaged."""
        return {} if self.run is None else read_mapping(self.run / "config.yaml") or {}

    @property
    def was_4bit(self) -> bool:
        """Whether the adapter was trained on a base in 4 bits."""
        return bool(self.settings.get("load_in_4bit"))

    @property
    def was_bf16(self) -> bool:
        """Whether the base was in bf16, which only a GPU trains in."""
        sessions = [] if self.run is None else read_sessions(self.run)
        machine = sessions[-1].get("machine") if sessions else None
        has_gpu = bool(isinstance(machine, dict) and machine.get("gpus"))
        return has_gpu and self.settings.get("bf16") is True and self.settings.get("device") != "cpu"


def find_source(name: str | Path) -> Source:
    """The model that `name` means. Of a run: final_model, or else the newest whole checkpoint."""
    folder = Path(name).expanduser()
    try:
        folder.exists()
    except OSError as error:
        raise UserError(
            f"'{str(name)[:100]}' can't be read ({error.strerror}): give the folder of a run."
        ) from None
    if _is_run(folder):
        return _newest(str(name), folder)
    run = folder.absolute().parent
    if _has_model(folder) and _is_run(run):
        number = folder.name.rpartition("-")[2]
        step = int(number) if number.isdecimal() else _steps(run)
        return Source(name=str(name), weights=folder, run=run, step=step)
    if not _has_model(folder) and str(name) not in (PEBBLE, SMOLLM2):
        _suggest_run(folder)
    return Source(name=str(name))


def _newest(name: str, run: Path) -> Source:
    if _has_model(run / FINAL):
        return Source(name=name, weights=run / FINAL, run=run, step=_steps(run))
    checkpoints = complete_checkpoints(run)
    if not checkpoints:
        raise UserError(
            f"The run {run} has no {FINAL} and no checkpoint yet: wait until it is finished, or finish it "
            "(the same command with auto_resume=true)."
        )
    return Source(name=name, weights=checkpoints[0].folder, run=run, step=checkpoints[0].step)


def _suggest_run(folder: Path) -> None:
    """A folder of runs, or the name of a run without its folder, is no model: name the run."""
    if folder.is_dir():
        runs = sorted(path.parent for path in folder.glob("*/config.yaml"))
        if runs:
            raise UserError(f"{folder} is a folder of runs: give one of them, such as {runs[0]}.")
    elif len(folder.parts) == 1 and (RUNS / folder / "config.yaml").is_file():
        raise UserError(f"There is no model '{folder}' here: did you mean {RUNS / folder}?")
    elif str(folder) == folder.name and not folder.exists():  # the hub's models have an owner
        raise UserError(
            f"There is no model or run '{folder}' here: give a folder, {PEBBLE}, {SMOLLM2}, or a name on the "
            "hub with its owner (Qwen/Qwen3-0.6B)."
        )


def _has_model(folder: Path) -> bool:
    return any((folder / file).is_file() for file in MODEL_FILES)


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and not _has_model(folder)


def _steps(run: Path) -> int:
    steps = (read_mapping(run / "train_results.json") or {}).get("steps")
    return steps if type(steps) is int and steps >= 0 else 0
