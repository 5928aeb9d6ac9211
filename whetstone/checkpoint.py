"""Save, find, verify, resume exactly, on as many ranks as there happen to be.

`checkpoint-N/` is an ordinary transformers (or peft) folder plus `state/` (masters and moments of the
optimisers, by torch's distributed checkpoint: every rank writes its part, any other number of ranks reads
it), `numbers.pt` (schedule, coefficients, curriculum, a batch under way) and `whetstone.json` (step, sizes of
all files), which is written last. It is written in the background, aside, and renamed, so one that has its
final name is whole. Nothing else is needed to resume: problems and samples are functions of (seed, step).
"""

import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from whetstone.errors import UserError
from whetstone.parallel.collectives import wait_for_all
from whetstone.parallel.mesh import ALONE, Ranks

MARK = "whetstone.json"
STATE = "state"
NUMBERS = "numbers.pt"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    folder: Path
    step: int  # optimiser steps done

    def load_tensors(self, into: dict[str, Any]) -> None:
        """Read the state into tensors that have its shapes, however they are spread now."""
        if not (self.folder / STATE).is_dir():
            raise UserError(
                f"{self.folder} has no folder {STATE}: an older version wrote it, and has to go on with it."
            )
        _quieten()
        load(into, checkpoint_id=self.folder / STATE, no_dist=not dist.is_initialized())

    def numbers(self) -> dict[str, Any]:
        return torch.load(self.folder / NUMBERS, weights_only=True)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What goes into a checkpoint. `write_model` writes the ordinary model folder; it is called in the
    background.
    """

    step: int
    write_model: Callable[[Path], None]
    tensors: dict[str, Any]
    numbers: dict[str, Any]


class Saver:
    """Writes checkpoints of a run while it goes on, one at a time. All ranks call it alike."""

    def __init__(self, run: Path, keep: int | None, ranks: Ranks = ALONE):
        self._run = run
        self._keep = keep
        self._ranks = ranks
        # Of its own: what is agreed upon in the background must not mix with what training agrees upon.
        self._group: Any = dist.new_group(backend="gloo") if ranks.mesh is not None else None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(self, contents: Contents) -> None:
        """Begin to write `checkpoint-<step>`: returns when the tensors have been copied."""
        self.finish()
        folder = self._run / f"checkpoint-{contents.step}"
        aside = folder.with_name(f".{folder.name}.writing")
        if self._ranks.is_main:
            _aside(folder).mkdir(parents=True)
        wait_for_all(self._ranks)
        _quieten()
        begun: Any = async_save(
            contents.tensors,
            checkpoint_id=aside / STATE,
            process_group=self._group,
            no_dist=self._ranks.mesh is None,
        )
        contents = replace(contents, tensors={})  # copied: what was put together for it can go
        writing = getattr(begun, "upload_completion", begun)  # a future, or a response that holds one

        def complete() -> None:
            try:
                if self._ranks.is_main:
                    contents.write_model(aside)
                    torch.save(contents.numbers, aside / NUMBERS)
                writing.result()  # the first rank's is done when everybody's is
                if self._ranks.is_main:
                    _seal(aside, contents)
                    _put_in_place(aside, folder)
                    self._remove_old()
            except Exception as error:  # kept for whoever asks next: a thread has nobody to tell
                self._failure = error

        self._thread = threading.Thread(target=complete, name="checkpoint")
        self._thread.start()

    def finish(self) -> None:
        """Wait until what was begun is on the disk; raise if it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _remove_old(self) -> None:
        if self._keep is not None:
            for old in sorted(whole_checkpoints(self._run), key=lambda checkpoint: checkpoint.step)[
                : -self._keep
            ]:
                shutil.rmtree(old.folder)


def save_model(write_model: Callable[[Path], None], folder: Path) -> None:
    """A folder that transformers and vLLM load as it is (LoRA: the adapter), replaced as a whole."""
    aside = _aside(folder)
    aside.mkdir(parents=True)
    write_model(aside)
    _put_in_place(aside, folder)


def _seal(folder: Path, contents: Contents) -> None:
    sizes = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    mark = {"step": contents.step, "files": sizes}
    (folder / MARK).write_text(json.dumps(mark, indent=1))


def _quieten() -> None:
    """A single process is what was asked for: torch need not remark on it."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def whole_checkpoints(run: Path) -> list[Checkpoint]:
    """Every checkpoint of a run folder that is complete."""
    found = []
    for folder in run.glob("checkpoint-*"):
        if re.fullmatch(r"checkpoint-\d+", folder.name) and not problems(folder):
            found.append(Checkpoint(folder=folder, step=json.loads((folder / MARK).read_text())["step"]))
    return found


def problems(folder: Path) -> str | None:
    """Why a folder is not a whole checkpoint; None if it is."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        mark = json.loads((folder / MARK).read_text())
    except FileNotFoundError:
        return f"it has no {MARK}, so it is not a checkpoint of ours, or not a whole one"
    except json.JSONDecodeError:
        return f"its {MARK} is damaged"
    for name, size in mark["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"its file {name} is missing or has another size than when it was written"
    return None


def find(run: Path, *, resume_from: str | bool | None, auto_resume: bool) -> Checkpoint | None:
    """The checkpoint to go on from: the one that was named, else the newest whole one if that was asked
    for.
    """
    if isinstance(resume_from, str) and resume_from.lower() not in ("true", "false", ""):
        folder = Path(resume_from) if Path(resume_from).is_dir() else run / resume_from
        reason = problems(folder)
        if reason:
            there = (
                ", ".join(sorted(checkpoint.folder.name for checkpoint in whole_checkpoints(run))) or "none"
            )
            raise UserError(
                f"resume_from_checkpoint: {folder} can't be used, since {reason}. Whole checkpoints of this "
                f"run: {there}."
            )
        return Checkpoint(folder=folder, step=json.loads((folder / MARK).read_text())["step"])
    explicit = resume_from is True or str(resume_from).lower() == "true"
    if not explicit and not auto_resume:
        return None
    newest = max(whole_checkpoints(run), key=lambda checkpoint: checkpoint.step, default=None)
    if newest is None and explicit:
        raise UserError(
            f"resume_from_checkpoint: {run} holds no whole checkpoint to go on from: name one, or leave the "
            "key out to begin anew."
        )
    return newest


def _aside(folder: Path) -> Path:
    aside = folder.with_name(f".{folder.name}.writing")
    if aside.exists():  # left by a run that was killed while it wrote
        shutil.rmtree(aside)
    return aside


def share_files(folder: Path) -> None:
    """Let whoever may enter the folder read its files: safetensors creates them for their owner alone.

    The folder itself was created by the umask, which can't be asked for in a thread without changing it.
    """
    allowed = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode | allowed)


def _put_in_place(aside: Path, folder: Path) -> None:
    share_files(aside)
    for path in aside.rglob("*"):  # on the disk before it gets its name
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(aside, folder)
