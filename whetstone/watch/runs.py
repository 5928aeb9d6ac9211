"""Run folders as the page sees them: found by name, read in pieces, followed while they grow."""

import functools
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from whetstone.errors import UserError
from whetstone.run.metrics import parse_row
from whetstone.run.record import read_mapping, read_sessions

MARKS = ("metrics.jsonl", "config.yaml", "run.json")  # any of these makes a folder a run
MAX_DEPTH = 3
MAX_LINE = 4_000_000  # bytes of a line of completions


def find_runs(root: Path) -> dict[str, Path]:
    """Name -> folder: the folder itself, or the runs beneath it, the newest first."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder: give the folder of a run, or one that holds runs.")
    if _is_run(root):
        return {root.resolve().name: root}
    runs: list[Path] = []
    level = [root]
    for _ in range(MAX_DEPTH):
        below = sorted(path for folder in level for path in _folders(folder))
        runs += [path for path in below if _is_run(path)]
        level = [path for path in below if not _is_run(path)]
    runs.sort(key=_changed_at, reverse=True)
    return {path.relative_to(root).as_posix(): path for path in runs}


def _folders(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."]
    except OSError:
        return []


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MARKS)


def _changed_at(folder: Path) -> float:
    times = [path.stat().st_mtime for name in MARKS if (path := folder / name).is_file()]
    return max(times, default=0.0)


def summary(folder: Path) -> dict[str, Any]:
    """What a list of runs shows of each, without reading it all."""
    config = folder / "config.yaml"
    return {
        "config": _read_config(config, config.stat().st_mtime_ns) if config.is_file() else {},
        "sessions": read_sessions(folder),
        "status": read_mapping(folder / "status.json"),
        "results": read_mapping(folder / "train_results.json"),
    }


@functools.lru_cache(maxsize=1000)
def _read_config(path: Path, changed_at: int) -> dict[str, Any]:
    """YAML is slow to read, and the page lists all runs again and again."""
    del changed_at  # part of the key
    return read_mapping(path) or {}


@dataclass
class Follower:
    """New rows of metrics.jsonl, and new files beside it; each call reads what was added since the last."""

    folder: Path
    _offset: int = 0
    _inode: int | None = None
    _rest: bytes = b""
    _seen: dict[str, Any] = field(default_factory=dict)

    def changes(self) -> dict[str, Any]:
        """`reset`: forget what was sent before (the file was written anew, as at a resume)."""
        changes: dict[str, Any] = {}
        rows, is_new = self._rows()
        if is_new:
            changes["reset"] = True
        if rows:
            changes["rows"] = rows
        for name, value in (
            ("status", read_mapping(self.folder / "status.json")),
            ("evaluations", steps(self.folder / "eval_results", "eval_step_", ".json")),
            ("completions", steps(self.folder / "completions", "step_", ".jsonl")),
            ("tokens", steps(self.folder / "completions", "tokens_", ".npz")),
        ):
            if self._seen.get(name) != value:
                self._seen[name] = changes[name] = value
        return changes

    def _rows(self) -> tuple[list[dict[str, Any]], bool]:
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                state = os.fstat(file.fileno())
                is_new = self._inode is not None and (
                    state.st_ino != self._inode or state.st_size < self._offset
                )
                if is_new:
                    self._offset, self._rest = 0, b""
                self._inode = state.st_ino
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return [], False
        self._offset += len(data)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()  # half a line, or nothing
        rows = (parse_row(line.decode(errors="replace")) for line in lines)
        return [row for row in rows if row is not None], is_new


def steps(folder: Path, prefix: str, suffix: str) -> list[int]:
    """The steps that have a file."""
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except OSError:
        return []
    matches = [re.fullmatch(rf"{re.escape(prefix)}([0-9]+){re.escape(suffix)}", name) for name in names]
    return sorted(int(match[1]) for match in matches if match is not None)


def completions(folder: Path, step: int) -> list[dict[str, Any]]:
    """The completions of a step, as they were written; broken lines are left out."""
    path = folder / "completions" / f"step_{step}.jsonl"
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return []
    return list(_objects(lines))


def _objects(lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    for line in lines:
        if line and len(line) <= MAX_LINE:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


def evaluation(folder: Path, step: int) -> dict[str, Any] | None:
    return read_mapping(folder / "eval_results" / f"eval_step_{step}.json")


def tokens(folder: Path, step: int) -> dict[str, Any] | None:
    """The tokens of a step by completion; None where there are none, or the file is broken."""
    try:
        with np.load(folder / "completions" / f"tokens_{step}.npz", allow_pickle=False) as file:
            description = json.loads(file["description"].tobytes())
            ids, numbers, rules = file["token_ids"], file["numbers"].astype(np.float64), file["rules"]
            parts, start = [], 0
            for completion in description["completions"]:
                span = slice(start, start + completion["tokens"])
                shown = {
                    name: [None if x != x else round(x, 5) for x in numbers[row, span].tolist()]
                    for row, name in enumerate(description["columns"])
                    if not np.isnan(numbers[row, span]).all()
                }
                own = {"ids": ids[span].tolist(), "rules": rules[span].tolist(), "numbers": shown}
                parts.append({"row": completion, **own})
                start = span.stop
            return {
                "step": step,
                "rules": description["rules"],
                "texts": description["texts"],
                "parts": parts,
            }
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
