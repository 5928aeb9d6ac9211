"""What is exported or pushed: a run, a checkpoint, or a model by its name or folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whetstone.errors import UserError
from whetstone.model.manifest import NAME as MANIFEST
from whetstone.run.checkpoint import complete_checkpoints
from whetstone.run.record import read_mapping, read_sessions

FINAL = "final_model"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model, and the run that trained it."""

    model: str  # a folder, or a name that `model.hub.resolve` knows
    run: Path | None  # None: no run of ours
    step: int  # optimizer steps of the run; 0: not trained by it

    @property
    def is_final(self) -> bool:
        """Whether it is the model that the results of the run belong to."""
        return self.run is not None and Path(self.model).name == FINAL

    @property
    def name(self) -> str:
        """A short name for the model, without a path."""
        if self.run is None:
            return Path(self.model).name
        run = str(self.config.get("run_name") or self.run.resolve().name)
        return run if self.is_final else f"{run}-{Path(self.model).name}"

    @property
    def config(self) -> dict[str, Any]:
        """config.yaml of the run."""
        return {} if self.run is None else read_mapping(self.run / "config.yaml") or {}

    @property
    def was_4bit(self) -> bool:
        """Whether the adapter was trained on a base in 4 bits."""
        return bool(self.config.get("load_in_4bit"))

    @property
    def was_bf16(self) -> bool:
        """Whether the base was in bf16, which only a GPU trains in."""
        sessions = [] if self.run is None else read_sessions(self.run)
        machine = sessions[-1].get("machine") if sessions else None
        has_gpu = bool(isinstance(machine, dict) and machine.get("gpus"))
        return has_gpu and self.config.get("bf16") is True and self.config.get("device") != "cpu"


def find_source(name: str) -> Source:
    """The final model of a run (or its newest checkpoint), the checkpoint, or the model of that name."""
    folder = Path(name).expanduser()
    try:
        folder.exists()
    except OSError as error:
        raise UserError(
            f"'{name[:100]}' can't be read ({error.strerror}): give the folder of a run."
        ) from None
    if _is_run(folder):
        final = folder / FINAL
        if final.is_dir():
            return Source(model=str(final), run=folder, step=_steps(folder))
        checkpoints = complete_checkpoints(folder)
        if not checkpoints:
            raise UserError(
                f"{folder} has neither {FINAL} nor a whole checkpoint: finish the run first (the same "
                "command with auto_resume=true)."
            )
        return Source(model=str(checkpoints[0].folder), run=folder, step=checkpoints[0].step)
    run = folder.absolute().parent
    if (folder / MANIFEST).is_file() and _is_run(run):
        number = folder.name.rpartition("-")[2]
        step = int(number) if number.isdecimal() else _steps(run)
        return Source(model=str(folder), run=run, step=step)
    return Source(model=name, run=None, step=0)


def _is_run(folder: Path) -> bool:
    has_model = (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()
    return (folder / "config.yaml").is_file() and not has_model


def _steps(run: Path) -> int:
    steps = (read_mapping(run / "train_results.json") or {}).get("steps")
    return steps if type(steps) is int and steps >= 0 else 0
