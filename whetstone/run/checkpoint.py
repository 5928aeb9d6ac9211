"""Save, find, verify, resume exactly, on as many ranks as there happen to be.

`checkpoint-N/` is an ordinary transformers (or peft) folder plus `state/` (masters and moments of the
optimisers, by torch's distributed checkpoint: every rank writes its part, any other number of ranks reads
it), `numbers.pt` (schedule, coefficients, curriculum, a batch under way) and the manifest `whetstone.json`
(step, checksums of all files), which is written last. It is written in the background, aside, and renamed, so
one that has its final name is whole; checksums are verified before it is used. Nothing else is needed to
resume: problems and samples are functions of (seed, step). Nothing in it is unpickled but tensors and plain
data.
"""

import logging
import os
import pickle
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from whetstone.errors import UserError
from whetstone.model.manifest import (
    CARD,
    NAME,
    Damage,
    Manifest,
    check_sizes,
    damaged_files,
    read_manifest,
    write_manifest,
)
from whetstone.parallel.collectives import gather_from_all, main_first, wait_for_all
from whetstone.parallel.mesh import ALONE, Ranks
from whetstone.parallel.state_reader import StateReader, TensorPlanner

STATE = "state"
NUMBERS = "numbers.pt"
SAID_FROM = 2 * 10**9  # bytes: verification that takes about a second and more is announced

logger = logging.getLogger("whetstone")


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
        reader = StateReader(self.folder / STATE)
        try:
            reader.read_metadata()  # torch would log a traceback
            load(
                into,
                storage_reader=reader,
                planner=TensorPlanner(),
                no_dist=not dist.is_initialized(),
            )
        except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise UserError(
                f"The state of {self.folder} does not fit these settings, or can't be read "
                f"({_reason(error)}): set optim, advantage, critic and kl_reference as they were, or resume "
                "from another checkpoint (resume_from_checkpoint)."
            ) from None

    def numbers(self) -> dict[str, Any]:
        try:
            numbers = torch.load(self.folder / NUMBERS, weights_only=True)
            if not isinstance(numbers, dict):
                raise Damage("it holds something else")
        except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
            raise UserError(
                f"{self.folder / NUMBERS} can't be read ({_reason(error)}): resume from another checkpoint "
                "(resume_from_checkpoint)."
            ) from None
        return numbers

    @property
    def seconds(self) -> float:
        """How long the run had taken, as the manifest has it."""
        return read_manifest(self.folder).seconds


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
    """Writes checkpoints of a run while it goes on, one at a time. All ranks call it alike.

    `saved`: the step of the checkpoint in `run` that the run resumes from.
    """

    def __init__(self, run: Path, keep: int | None, ranks: Ranks = ALONE, saved: int | None = None):
        self._run = run
        self._keep = keep
        self._ranks = ranks
        self._saved = saved
        # Of its own: what is agreed upon in the background must not mix with what training agrees upon.
        self._group: Any = dist.new_group(backend="gloo") if ranks.mesh is not None else None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        if ranks.is_main:
            remove_leftovers(run)

    def save(self, contents: Contents) -> None:
        """Begin to write `checkpoint-<step>`: returns when the tensors have been copied."""
        self.finish()
        folder = self._run / f"checkpoint-{contents.step}"
        aside = _temporary(folder, "writing")
        if self._ranks.is_main:
            _make_room(aside).mkdir(parents=True)
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
                    write_manifest(aside, step=contents.step, seconds=contents.numbers.get("seconds", 0.0))
                    _put_in_place(aside, folder)
                    self.remove_old()
            except CheckpointException as error:  # torch's own, and no Exception
                self._failure = RuntimeError(_reason(error))
            except Exception as error:  # kept for whoever asks next: a thread has nobody to tell
                self._failure = error

        self._saved = contents.step
        self._thread = threading.Thread(target=complete, name="checkpoint")
        self._thread.start()

    def has(self, step: int) -> bool:
        """Whether the newest checkpoint, written or under way, is that of `step`."""
        return step == self._saved

    def finish(self) -> None:
        """Wait until what was begun is on the disk; raise if it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure, self._saved = self._failure, None, None
            raise failure

    def remove_old(self) -> None:
        """Keep the newest checkpoints, as many as were asked for. A kill leaves no half of one behind."""
        if self._keep is None or not self._ranks.is_main:
            return
        for old in whole_checkpoints(self._run)[self._keep :]:
            going = _make_room(_temporary(old.folder, "deleting"))
            old.folder.rename(going)
            _delete(going)


def save_model(write_model: Callable[[Path], None], folder: Path, step: int) -> None:
    """A folder that transformers and vLLM load as it is (LoRA: the adapter), replaced as a whole."""
    aside = _make_room(_temporary(folder, "writing"))
    aside.mkdir(parents=True)
    write_model(aside)
    write_manifest(aside, step=step)
    _put_in_place(aside, folder)


def remove_leftovers(run: Path) -> None:
    """Delete what a kill left under our temporary names, half written or half deleted."""
    for ending in ("writing", "deleting"):
        for path in (*run.glob(f".checkpoint-*.{ending}"), *run.glob(f".final_model.{ending}")):
            _make_room(path)


def move_aside(path: Path, ending: str = "aside") -> Path:
    """Rename what is in the way, so that nothing is lost; returns its new place."""
    name = f"{path.name.lstrip('.')}.{ending}"
    place, number = path.with_name(name), 1
    while os.path.lexists(place):
        number += 1
        place = path.with_name(f"{name}-{number}")
    path.rename(place)
    return place


def whole_checkpoints(run: Path) -> list[Checkpoint]:
    """Every checkpoint of a run folder with a manifest and all of its files, newest first. Checksums are not
    verified.
    """
    return [
        Checkpoint(folder=folder, step=int(folder.name.rpartition("-")[2]))
        for folder in named_checkpoints(run)
        if problems(folder) is None
    ]


def named_checkpoints(run: Path) -> list[Path]:
    """Whatever is called `checkpoint-N`, newest first."""
    found = [path for path in run.glob("checkpoint-*") if re.fullmatch(r"checkpoint-[0-9]{1,18}", path.name)]
    return sorted(found, key=lambda path: (int(path.name.rpartition("-")[2]), path.name), reverse=True)


def problems(folder: Path) -> str | None:
    """Why a folder is not a whole checkpoint; None if it is, as far as can be told without reading it all."""
    try:
        manifest = read_manifest(folder)
        for name in (NUMBERS, f"{STATE}/.metadata") if (folder / STATE).exists() else ():
            if name not in manifest.files:
                raise Damage(f"its {NAME} does not list {name}")
        check_sizes(folder, manifest)
    except Damage as damage:
        return str(damage)
    return None


@dataclass(frozen=True, kw_only=True)
class Search:
    """What was found: the checkpoint to resume from (None: begin anew), and newer ones that are damaged."""

    checkpoint: Checkpoint | None
    damaged: dict[Path, str]  # folder -> why it can't be used
    notes: tuple[str, ...] = ()


def find(
    run: Path,
    *,
    resume_from: str | bool | None,
    auto_resume: bool,
    ranks: Ranks = ALONE,
    say: Callable[[str], None] = logger.info,
) -> Search:
    """The checkpoint to resume from: the one that was named, else the newest whole one if that was asked for.

    All ranks call it, and share the work of verification.
    """
    damaged: dict[Path, str] = {}
    named = isinstance(resume_from, str) and resume_from.lower() not in ("true", "false", "")
    explicit = named or resume_from is True or str(resume_from).lower() == "true"
    if not explicit and not auto_resume:
        return Search(checkpoint=None, damaged=damaged)
    if named:
        folder = Path(str(resume_from))
        candidates = [folder if folder.is_dir() else run / folder]
    else:
        candidates = main_first(ranks, lambda: named_checkpoints(run), to_all=True) or []
    for folder in candidates:
        begun = time.monotonic()
        reason, manifest = verify(folder, ranks, say)
        if reason is None and manifest is not None:
            note = (
                f"Verified {folder.name}: {_bytes(manifest.num_bytes)} in {time.monotonic() - begun:.1f} s."
            )
            if not manifest.has_checksums:
                note = (
                    f"{folder.name} has no checksums (an older version wrote it): only sizes were verified."
                )
            found = Checkpoint(folder=folder, step=manifest.step)
            return Search(checkpoint=found, damaged=damaged, notes=(note,))
        damaged[folder] = str(reason)
    if named:
        there = ", ".join(sorted(path.folder.name for path in whole_checkpoints(run))) or "none"
        raise UserError(
            f"resume_from_checkpoint: {candidates[0]} can't be used, since {damaged[candidates[0]]}. Whole "
            f"checkpoints of this run: {there}."
        )
    if explicit or damaged:
        reasons = "; ".join(f"{folder.name}: {reason}" for folder, reason in damaged.items())
        raise UserError(
            f"{run} holds no whole checkpoint to go on from{f' ({reasons})' if reasons else ''}: name one "
            "(resume_from_checkpoint), or begin anew with auto_resume=false overwrite_output_dir=true (the "
            "old run is moved aside)."
        )
    return Search(checkpoint=None, damaged=damaged)


def verify(folder: Path, ranks: Ranks, say: Callable[[str], None]) -> tuple[str | None, Manifest | None]:
    """Why a checkpoint can't be used (None: it can), and its manifest. All ranks hash a share of it."""

    def look() -> tuple[str | None, Manifest | None]:
        reason = problems(folder)
        return reason, None if reason else read_manifest(folder)

    reason, manifest = main_first(ranks, look, to_all=True) or (None, None)
    if manifest is None:
        return reason, None
    if manifest.num_bytes >= SAID_FROM and ranks.is_main:
        say(f"Verifying {_bytes(manifest.num_bytes)} of {folder.name} ...")
    mine = damaged_files(folder, manifest, part=ranks.rank, num_parts=ranks.world_size)
    wrong = sorted({name for names in gather_from_all(ranks, mine) for name in names})
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"its file {wrong[0]}{more} is damaged (the checksum differs)", None
    return None, manifest


def _quieten() -> None:
    """A single process is what was asked for: torch need not remark on it."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _reason(error: BaseException) -> str:
    """One line of what went wrong; torch's exception hides the reason of each rank."""
    if isinstance(error, CheckpointException):
        error = next((cause[0] for cause in error.failures.values()), error)
    if isinstance(error, pickle.UnpicklingError):  # torch's own message advises to load it all the same
        return "it is damaged, or holds more than tensors and numbers"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _bytes(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def _temporary(folder: Path, ending: str) -> Path:
    return folder.with_name(f".{folder.name}.{ending}")


def _make_room(path: Path) -> Path:
    """Our own temporary folder, of a run that was killed, goes; what else has its name is kept."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        logger.warning(f"{path} was in the way and is now {move_aside(path).name}.")
    return path


def _delete(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


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
    for path in (*aside.rglob("*"), aside):  # on the disk before it gets its name
        if path.is_file() or path.is_dir():
            _sync(path)
    going = None
    if os.path.lexists(folder):
        if _is_as_written(folder):
            going = _make_room(_temporary(folder, "deleting"))
            folder.rename(going)
        else:
            logger.warning(f"{folder} is not as it was written: it is now {move_aside(folder).name}.")
    os.replace(aside, folder)
    _sync(folder.parent)
    if going is not None:
        _delete(going)


def _is_as_written(folder: Path) -> bool:
    """Whether a folder is ours and nobody has changed it or put something into it since."""
    if folder.is_symlink():
        return False
    try:
        manifest = read_manifest(folder)
        check_sizes(folder, manifest)
    except Damage:
        return False
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    return there - {CARD} == {*manifest.files, NAME} and not damaged_files(folder, manifest)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
