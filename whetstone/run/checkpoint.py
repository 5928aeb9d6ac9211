"""Checkpoints: written in the background, resumed bit-exactly, on any number of ranks.

`checkpoint-N/` is a transformers (or peft) folder plus `state/` (master weights and moments, by torch's
distributed checkpoint), `scalars.pt` (schedule, coefficients, curriculum, a pending batch) and the manifest
`whetstone.json` (step, checksums), which is written last. A checkpoint with its final name is complete. Only
tensors and plain data are unpickled.
"""

import io
import logging
import pickle
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from whetstone.errors import UserError
from whetstone.model.manifest import Damage, write_manifest
from whetstone.parallel.collectives import barrier
from whetstone.parallel.fsdp import like, local
from whetstone.parallel.mesh import SINGLE, Ranks
from whetstone.parallel.state_reader import StateReader, TensorPlanner
from whetstone.run.atomic_folder import clear_temp, delete, publish, temp_dir
from whetstone.run.checkpoint_folder import SCALARS, STATE, named_checkpoints, why_incomplete

logger = logging.getLogger("whetstone")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    folder: Path
    step: int  # optimizer steps done

    def load_tensors(self, into: dict[str, Any]) -> None:
        """Read the state into tensors of its shapes, however they are sharded now."""
        if not (self.folder / STATE).is_dir():
            raise UserError(f"{self.folder} was written by an older version and cannot be resumed.")
        _silence_warning()
        reader = StateReader(self.folder / STATE)
        try:
            reader.read_metadata()  # torch would log a traceback
            load(into, storage_reader=reader, planner=TensorPlanner(), no_dist=not dist.is_initialized())
        except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise UserError(
                f"The state of {self.folder} does not fit these settings, or can't be read "
                f"({error_reason(error)}): set optim, advantage, critic and kl_reference as they were, or "
                "resume from another checkpoint (resume_from_checkpoint)."
            ) from None

    def scalars(self) -> dict[str, Any]:
        try:
            scalars = torch.load(self.folder / SCALARS, weights_only=True)
            if not isinstance(scalars, dict):
                raise Damage("it holds something else")
        except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
            raise UserError(
                f"{self.folder / SCALARS} can't be read ({error_reason(error)}): resume from another "
                "checkpoint (resume_from_checkpoint)."
            ) from None
        return scalars


@dataclass(frozen=True, kw_only=True)
class CheckpointData:
    """The content of a checkpoint. `write_model` writes the model folder; it is called in the background."""

    step: int
    write_model: Callable[[Path], None]
    tensors: dict[str, Any]
    scalars: dict[str, Any]


class HostCopy(AsyncStager):
    """Copies the state to the host tensor by tensor.

    torch's own stager copies storages, and stops at a sharded tensor that begins inside one, as moments do.
    """

    _synchronize_after_execute = False

    def stage(self, state_dict: Any) -> Any:
        if isinstance(state_dict, dict):
            return {name: self.stage(value) for name, value in state_dict.items()}
        if isinstance(state_dict, Tensor):
            return like(state_dict, local(state_dict.detach()).to("cpu", copy=True))
        return state_dict


class Saver:
    """Writes checkpoints in the background, one at a time. Every method is a collective call."""

    def __init__(self, run: Path, keep: int | None, ranks: Ranks = SINGLE, saved: int | None = None):
        self._run, self._keep, self._ranks = run, keep, ranks
        self._saved = saved  # the step of the newest checkpoint in `run`
        # A group of its own: collectives in the background must not mix with those of training.
        self._group: Any = dist.new_group(backend="gloo") if ranks.mesh is not None else None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        for ending in ("writing", "deleting") if ranks.is_main else ():  # of a run that was killed
            for path in (*run.glob(f".checkpoint-*.{ending}"), *run.glob(f".final_model.{ending}")):
                clear_temp(path)

    def save(self, data: CheckpointData) -> None:
        """Start to write `checkpoint-<step>`; returns when everything has been copied."""
        self.finish()
        folder = self._run / f"checkpoint-{data.step}"
        aside = temp_dir(folder, "writing")
        if self._ranks.is_main:
            clear_temp(aside).mkdir(parents=True)
        barrier(self._ranks)
        _silence_warning()
        pending: Any = async_save(
            data.tensors,
            checkpoint_id=aside / STATE,
            async_stager=HostCopy(),
            process_group=self._group,
            no_dist=self._ranks.mesh is None,
        )
        data = replace(data, tensors={})  # copied: free the gathered tensors
        scalars = io.BytesIO()
        torch.save(data.scalars, scalars)  # they hold lists that the next batch extends
        writing = getattr(pending, "upload_completion", pending)  # a future, or a response that holds one

        def complete() -> None:
            try:
                if self._ranks.is_main:
                    data.write_model(aside)
                    (aside / SCALARS).write_bytes(scalars.getvalue())
                writing.result()  # the first rank's is done when everybody's is
                if self._ranks.is_main:
                    write_manifest(aside, step=data.step, seconds=data.scalars.get("seconds", 0.0))
                    publish(aside, folder)
                    self.remove_old()
            except CheckpointException as error:  # torch's own, and no Exception
                self._failure = RuntimeError(error_reason(error))
            except Exception as error:  # raised by `finish`
                self._failure = error

        self._saved = data.step
        self._thread = threading.Thread(target=complete, name="checkpoint")
        self._thread.start()

    def has(self, step: int) -> bool:
        """Whether the newest checkpoint, written or being written, is that of `step`."""
        return step == self._saved

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure, self._saved = self._failure, None, None
            raise failure

    def remove_old(self) -> None:
        """Delete all but the newest `keep` checkpoints, each by rename first."""
        if self._keep is None or not self._ranks.is_main:
            return
        for old in complete_checkpoints(self._run)[self._keep :]:
            doomed = clear_temp(temp_dir(old.folder, "deleting"))
            old.folder.rename(doomed)
            delete(doomed)


def save_model(write_model: Callable[[Path], None], folder: Path, step: int) -> None:
    """Write a folder that transformers and vLLM load (LoRA: the adapter); replaces an old one."""
    aside = clear_temp(temp_dir(folder, "writing"))
    aside.mkdir(parents=True)
    write_model(aside)
    write_manifest(aside, step=step)
    publish(aside, folder)


def complete_checkpoints(run: Path) -> list[Checkpoint]:
    """Checkpoints with a manifest and all of its files, newest first. Checksums are not verified."""
    return [
        Checkpoint(folder=folder, step=int(folder.name.rpartition("-")[2]))
        for folder in named_checkpoints(run)
        if why_incomplete(folder) is None
    ]


def _silence_warning() -> None:
    """torch warns about a single process without torch.distributed."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def error_reason(error: BaseException) -> str:
    """One line of what went wrong; torch's exception hides the reason of each rank."""
    if isinstance(error, CheckpointException):
        error = next((cause[0] for cause in error.failures.values()), error)
    if isinstance(error, pickle.UnpicklingError):  # torch's own message advises to load it all the same
        return "it is damaged, or holds more than tensors and numbers"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
