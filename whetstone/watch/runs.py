"""Run folders as the page sees them: found by name, read in pieces, followed while they grow."""

import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from whetstone.errors import UserError
from whetstone.run.comparison import GRID, cell_results, make_results, read_cells, run_path, versus_first
from whetstone.run.metrics import parse_row
from whetstone.run.record import read_mapping, read_sessions
from whetstone.watch.tokens import tokens

MARKS = ("metrics.jsonl", "config.yaml", "run.json")  # any of these makes a folder a run
MAX_DEPTH = 3
MAX_FILES = 500  # that are searched for a problem
MAX_LINE = 4_000_000  # bytes of a line of completions


def find_runs(root: Path) -> dict[str, Path]:
    """Name -> folder: the folder itself if it is a run, and the runs inside it, the newest first."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder: give the folder of a run, or one that holds runs.")
    own = {root.resolve().name: root} if _is_run(root) else {}
    runs = [path for path in _walk(root) if _is_run(path)]
    runs.sort(key=_changed_at, reverse=True)
    return own | {path.relative_to(root).as_posix(): path for path in runs}


def find_grids(root: Path) -> dict[str, Path]:
    """Name -> folder of each comparison (`whet compare`)."""
    return {
        path.resolve().name if path == root else path.relative_to(root).as_posix(): path
        for path in [root, *_walk(root)]
        if (path / GRID).is_file()
    }


def _walk(root: Path) -> Iterator[Path]:
    """The folders inside `root`, without those inside a run in it."""
    level = [root]
    for _ in range(MAX_DEPTH):
        level = sorted(
            path for folder in level if folder == root or not _is_run(folder) for path in _folders(folder)
        )
        yield from level


def _folders(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."]
    except OSError:
        return []


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MARKS)


def _changed_at(folder: Path, names: Iterable[str] = MARKS) -> float:
    times = [path.stat().st_mtime for name in names if (path := folder / name).is_file()]
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
    return list(_objects(_read(folder / "completions" / f"step_{step}.jsonl").split(b"\n")))


def _objects(lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    for line in lines:
        if line and len(line) <= MAX_LINE:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


def grid(folder: Path, names: Mapping[Path, str]) -> dict[str, Any] | None:
    """A comparison while it fills: its cells, and means over the seeds that have ended; `names` of runs."""
    comparison = read_cells(folder)
    if comparison is None:
        return None
    source, cells = comparison
    folders = {cell.name: run_path(folder, cell) for cell in cells}
    ends = tuple(_changed_at(path, ("train_results.json",)) for path in folders.values())
    results = _grid_results(folder, (folder / GRID).stat().st_mtime_ns, ends)
    if results is None:
        return None
    known = {run["run"]: run for variant in results for run in variant["seeds"]}

    def accuracy(name: str, when: str) -> float | None:
        return known[name][f"accuracy_{when}"]["mean"] if name in known else None

    return {
        "source": source,
        "cells": [
            {
                "name": cell.name,
                "variant": cell.variant,
                "seed": cell.seed,
                "run": names.get(folders[cell.name]),
                "before": accuracy(cell.name, "before"),
                "after": accuracy(cell.name, "after"),
            }
            for cell in cells
        ],
        "variants": [
            {key: variant[key] for key in ("name", "num_seeds", "accuracy_after", "gain", "versus")}
            for variant in results
        ],
    }


@functools.lru_cache(maxsize=100)
def _grid_results(folder: Path, changed_at: int, ends: tuple[float, ...]) -> list[dict[str, Any]] | None:
    """Means over seeds; computed again when a run has ended."""
    del changed_at, ends  # part of the key
    comparison = read_cells(folder)
    if comparison is None:
        return None
    source, cells = comparison
    folders = {cell.name: run_path(folder, cell) for cell in cells}
    try:
        ended = {name: cell_results(path) for name, path in folders.items()}
        variants = make_results(source, cells, ended, failed={})["variants"]
        changes = versus_first(variants, folders) if variants else []
    except (ValueError, KeyError, TypeError):  # a file of another version, or broken
        return None
    return [{**variant, "versus": change} for variant, change in zip(variants, changes, strict=True)]


def problem(folder: Path, name: str) -> dict[str, Any]:
    """A problem at every step that has completions of it, in training and evaluation."""
    # A file that does not hold the name, in either form that JSON has for it, is not parsed.
    forms = {json.dumps(name, ensure_ascii=ascii).encode(errors="replace") for ascii in (True, False)}

    def has_name(data: bytes) -> bool:
        return any(form in data for form in forms)

    training, entries = folder / "completions", []
    for step in _spread(steps(training, "step_", ".jsonl")):
        data = _read(training / f"step_{step}.jsonl")
        lines = filter(has_name, data.split(b"\n")) if has_name(data) else ()
        entries.append(_entry("training", step, name, list(_objects(lines))))
    known = {entry["step"] for entry in entries if entry is not None}
    for step in _spread(steps(training, "tokens_", ".npz")):
        if step not in known and has_name(_read(training / f"tokens_{step}.npz")):
            parts = (tokens(folder, step) or {"parts": []})["parts"]
            entries.append(_entry("training", step, name, [part["row"] for part in parts]))
    for step in _spread(steps(folder / "eval_results", "eval_step_", ".json")):
        if has_name(_read(folder / "eval_results" / f"eval_step_{step}.json")):
            rows = (evaluation(folder, step) or {}).get("completions")
            entries.append(_entry("evaluation", step, name, rows if isinstance(rows, list) else []))
    present = [entry for entry in entries if entry is not None]
    return {"entries": sorted(present, key=lambda entry: entry["step"])}


def _entry(kind: str, step: int, name: str, rows: list[Any]) -> dict[str, Any] | None:
    own = [row for row in rows if isinstance(row, dict) and row.get("problem") == name]
    return problem_entry(kind, step, own)


def problem_entry(kind: str, step: int, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The completions of a problem at a step, in numbers; None where there are none."""
    numbers = [row for row in rows if isinstance(row.get("reward"), int | float)]
    if not numbers:
        return None
    right = [(row.get("parts") or {}).get("correct") for row in numbers]
    return {
        "kind": kind,
        "step": step,
        "count": len(numbers),
        "reward": fmean(row["reward"] for row in numbers),
        "right": None if None in right else sum(map(bool, right)),
        "length": fmean(row.get("length") or 0 for row in numbers),
    }


def _spread(all_steps: list[int]) -> list[int]:
    """At most MAX_FILES of them, evenly, with the first and the last."""
    count = len(all_steps)
    if count <= MAX_FILES:
        return all_steps
    return sorted({all_steps[round(n * (count - 1) / (MAX_FILES - 1))] for n in range(MAX_FILES)})


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def tasks(folder: Path, step: int) -> dict[str, Any] | None:
    """Accuracy of each task at an evaluation."""
    summary = (evaluation(folder, step) or {}).get("summary")
    per_task = (
        summary.get("per_task") if isinstance(summary, dict) and summary.get("is_judged", True) else None
    )
    return per_task if isinstance(per_task, dict) else None


def evaluation(folder: Path, step: int) -> dict[str, Any] | None:
    return read_mapping(folder / "eval_results" / f"eval_step_{step}.json")
