"""The metrics log: metrics.jsonl always, and wandb, tensorboard or trackio by `report_to`.

A sink that fails to start raises; one that fails later is logged once and disabled.
"""

import contextlib
import json
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from whetstone.config import Config, flatten
from whetstone.errors import explained
from whetstone.files import atomic_write, explain_disk_errors, json_safe
from whetstone.run.atomic_folder import free_path
from whetstone.terminal.text import counted

logger = logging.getLogger("whetstone")
MAX_STEP = 2**53
RESERVED = ("step", "kind", "reward", "accuracy")  # in every row, or with a meaning where they are


@dataclass(frozen=True)
class Sink:
    """Where metrics go besides metrics.jsonl."""

    write: Callable[[int, Mapping[str, float]], object]  # of a step, a row
    close: Callable[[], object]


class MetricsLog:
    """Writes the metrics of a run. A resumed run first drops rows after `resume_step`."""

    def __init__(
        self, folder: Path, config: Config, *, resume_step: int | None = None, has_sinks: bool = True
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        run = config.run
        start_step = resume_step or 0
        self._schedule = LogSchedule(run.logging_steps, start_step=start_step)
        self._path = folder / "metrics.jsonl"
        self._sinks: dict[str, Sink] = {}
        for name in run.report_to if has_sinks else ():
            with explained(partial(_start_error, name)):
                self._sinks[name] = SINKS[name](folder, config, resume_step)
        rows: list[dict[str, Any]] = []
        if resume_step is not None:
            _keep_damaged(self._path)
            rows = [row for row in read_rows(self._path) if row["step"] <= resume_step]
        self._begin({(row["kind"], row["step"]): row for row in rows})

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """A row of training: into metrics.jsonl at every step, elsewhere every `logging_steps`."""
        self._write("train", step, row)

    def log_eval(self, step: int, row: Mapping[str, float]) -> None:
        """A row of evaluation: everywhere."""
        self._write("eval", step, row)

    def close(self) -> None:
        self._file.close()
        for name in list(self._sinks):
            with self._guarded(name):
                self._sinks[name].close()

    def _begin(self, rows: dict[tuple[str, int], dict[str, Any]]) -> None:
        """Write the file with `rows` alone; rows to come follow them."""
        self._old_rows = rows
        atomic_write(self._path, "".join(_line(row) for row in rows.values()))
        self._file = self._path.open("a", encoding="utf-8")

    def _write(self, kind: str, step: int, row: Mapping[str, float]) -> None:
        numbers = {key: float(value) for key, value in row.items()}
        if (kind, step) in self._old_rows:  # the last evaluation of a run that was killed behind it
            self._file.close()
            self._begin({key: old for key, old in self._old_rows.items() if key != (kind, step)})
        with explain_disk_errors(self._path):
            self._file.write(_line({"step": step, "kind": kind, **numbers}))
            self._file.flush()
        if kind == "train" and not self._schedule.is_due(step):
            return
        shown = {f"{kind}/{key}": value for key, value in numbers.items() if math.isfinite(value)}
        for name in list(self._sinks):
            with self._guarded(name):
                self._sinks[name].write(step, shown)

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever another package's network or disk came to
            del self._sinks[name]
            reason = f"{type(error).__name__}: {error}"
            logger.warning(f"{name} failed ({reason}): nothing more is sent there; metrics.jsonl continues.")


def with_own(row: Mapping[str, float], own: Mapping[str, float]) -> dict[str, float]:
    """A row with what reward functions logged; where the run has such a metric, theirs gets a prefix."""
    reserved = {*row, *RESERVED}
    return {**{f"log_metric/{name}" if name in reserved else name: own[name] for name in own}, **row}


class LogSchedule:
    """When rows are shown outside metrics.jsonl: at the first, and when a multiple of `every` is passed."""

    def __init__(self, every: int, *, start_step: int) -> None:
        self._every, self._last = every, start_step

    def is_due(self, step: int) -> bool:
        due = step // self._every > self._last // self._every or self._last == 0
        self._last = step
        return due


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, as far as they are whole: a kill can leave half a line at the end."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [row for row in map(parse_row, lines) if row is not None]


def parse_row(line: str) -> dict[str, Any] | None:
    """A row as it was written: numbers, and null for what JSON has no number for; None for anything else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # a number can have too many digits, too
        return None
    if not isinstance(row, dict) or row.get("kind") not in ("train", "eval"):
        return None
    step = row.get("step")
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        return None
    numbers = [value for key, value in row.items() if key != "kind" and value is not None]
    fits = all(type(value) in (int, float) and abs(value) <= sys.float_info.max for value in numbers)
    return row if fits else None


def _keep_damaged(path: Path) -> None:
    """Copy a file with unreadable lines aside. A kill cuts the last line short: that is no damage."""
    if not path.is_file():
        return
    whole = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    lost = sum(parse_row(line) is None for line in whole)
    if lost:
        copy = free_path(path.with_name(f"{path.name}.damaged"))
        shutil.copyfile(path, copy)
        logger.warning(
            f"{path.name} has {counted(lost, 'line')} that can't be read: it continues without them, and "
            f"{copy.name} is a copy of it as it was."
        )


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(json_safe(row), ensure_ascii=False, allow_nan=False) + "\n"


def _identity(folder: Path, config: Config) -> dict[str, Any]:
    """What wandb and trackio want to know of a run."""
    run = config.run
    name = run.wandb_name or run.run_name or folder.name
    return {"project": run.wandb_project, "name": name, "config": flatten(config)}


def wandb_sink(folder: Path, config: Config, resume_step: int | None) -> Sink:
    """A wandb run. Its id lies in the run folder, so that a resumed run continues the same curves."""
    import wandb  # pyright: ignore[reportMissingImports]

    id_file = folder / ".wandb_id"
    known = id_file.read_text().strip() if resume_step is not None and id_file.is_file() else None
    run = wandb.init(
        **_identity(folder, config),
        entity=config.run.wandb_entity,
        tags=config.run.wandb_tags or None,
        dir=str(folder),
        id=known,
        resume="allow" if known else None,
    )
    id_file.write_text(run.id)
    # Our own axis: wandb's refuses to go back, which a resumed run does by a few steps.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return Sink(lambda step, row: run.log({"step": step, **row}), run.finish)


def tensorboard_sink(folder: Path, config: Config, resume_step: int | None) -> Sink:
    """Event files in `tensorboard/`; steps after the one resumed from are purged."""
    import tensorboard  # noqa: F401  # pyright: ignore[reportMissingImports]  # torch's own message hides its name
    from torch.utils.tensorboard import SummaryWriter

    purge = None if resume_step is None else resume_step + 1
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
    text = "\n".join(f"    {key}: {value}" for key, value in flatten(config).items())
    writer.add_text("config", text, 0)
    return Sink(lambda step, row: [writer.add_scalar(key, row[key], step) for key in row], writer.close)


def trackio_sink(folder: Path, config: Config, resume_step: int | None) -> Sink:
    import trackio  # pyright: ignore[reportMissingImports]

    run = trackio.init(**_identity(folder, config), resume="never" if resume_step is None else "allow")
    return Sink(lambda step, row: run.log(dict(row), step=step), run.finish)


SINKS = {"wandb": wandb_sink, "tensorboard": tensorboard_sink, "trackio": trackio_sink}


def _start_error(name: str, error: Exception) -> str | None:
    """Why a sink could not start; None: a bug."""
    if isinstance(error, ImportError):
        if error.name is not None and error.name.split(".")[0] != name:
            return None  # it is there, but something it needs is broken: its own message knows more
        return f"report_to needs {name}: `pip install {name}`, or set report_to=none."
    text = str(error).strip().rstrip(".") or type(error).__name__
    remedy = "`wandb login` or WANDB_MODE=offline, or " if name == "wandb" else ""
    return f"report_to: {name} could not start ({text}): try {remedy}report_to=none."
