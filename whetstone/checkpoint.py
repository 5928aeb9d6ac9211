"""Save, find, verify, resume exactly.

`checkpoint-N/` is an ordinary transformers (or peft) folder plus `trainer_state.pt` (optimiser, schedule,
master weights) and `whetstone.json` (step, sizes of all files), which is written last. A folder is written
aside and renamed, so one that has its final name is whole. Nothing else is needed to resume: problems and
samples are functions of (seed, step).
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whetstone.errors import UserError

MARK = "whetstone.json"
STATE = "trainer_state.pt"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    folder: Path
    step: int  # optimiser steps done

    def load_state(self) -> dict[str, Any]:
        return torch.load(self.folder / STATE, map_location="cpu", weights_only=True)


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """A folder that transformers and vLLM load as it is (LoRA: the adapter), replaced as a whole."""
    aside = _aside(folder)
    _write_model(model, tokenizer, aside)
    _put_in_place(aside, folder)


def save_checkpoint(
    run: Path, *, step: int, model: Any, tokenizer: Any, state: dict[str, Any], keep: int | None
) -> Path:
    """Write `checkpoint-<step>`; then remove the oldest beyond `keep`."""
    folder = run / f"checkpoint-{step}"
    aside = _aside(folder)
    _write_model(model, tokenizer, aside)
    torch.save(state, aside / STATE)
    sizes = {
        str(path.relative_to(aside)): path.stat().st_size
        for path in sorted(aside.rglob("*"))
        if path.is_file()
    }
    (aside / MARK).write_text(json.dumps({"step": step, "files": sizes}, indent=1))
    _put_in_place(aside, folder)
    if keep is not None:
        for old in sorted(whole_checkpoints(run), key=lambda checkpoint: checkpoint.step)[:-keep]:
            shutil.rmtree(old.folder)
    return folder


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


def _write_model(model: Any, tokenizer: Any, folder: Path) -> None:
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _aside(folder: Path) -> Path:
    aside = folder.with_name(f".{folder.name}.writing")
    if aside.exists():  # left by a run that was killed while it wrote
        shutil.rmtree(aside)
    return aside


def _put_in_place(aside: Path, folder: Path) -> None:
    for path in aside.rglob("*"):  # on the disk before it gets its name
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(aside, folder)
