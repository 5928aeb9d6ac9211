"""Whether a run that was killed and resumed left what an uninterrupted one leaves: bit for bit where it
counts.

Left out: clock times, and what is said for people (the log, the report).
"""

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

TIMED = (
    "time/",
    "step_time",
    "setup_time",
    "tokens_per_s",
    "rollout_tokens_per_s",
    "update_tokens_per_s",
    "peak_memory_gb",
    "mfu",
    "host/",
    "gpu/",
    "episodes/environment_s",
    "episodes/idle_s",
)
TIMED_KEYS = frozenset(
    ["seconds", "tokens_per_s", "date", "started", "duration_s", "turn_seconds", "environment_s"]
)


def differences(whole: Path, resumed: Path, *, damaged: bool = False) -> list[str]:
    """Every way in which a resumed run folder differs from the uninterrupted one's.

    With `damaged`, a checkpoint may have been moved aside (`checkpoint-2.damaged`).
    """
    found = _folders_differ(whole, resumed, "final_model")
    found += _rows_differ(whole / "metrics.jsonl", resumed / "metrics.jsonl")
    for folder in ("eval_results", "completions"):
        found += _json_differs(whole, resumed, folder)
    found += _checkpoints_differ(whole, resumed, damaged)
    found += [f"{name} is left behind" for name in _leftovers(resumed)]
    if not (resumed / "report.html").is_file():
        found.append("there is no report.html")
    before, after = (_untimed(_read(run / "train_results.json")) for run in (whole, resumed))
    if before != after:
        found.append(f"train_results.json differs: {_first_difference(before, after)}")
    return found


def _folders_differ(whole: Path, resumed: Path, name: str) -> list[str]:
    before, after = _files(whole / name), _files(resumed / name)
    if before != after:
        return [f"{name} has the files {sorted(after)}, not {sorted(before)}"]
    return [
        f"{name}/{file} is not bit-equal"
        for file in sorted(before)
        if _content(whole / name / file) != _content(resumed / name / file)
    ]


def _content(file: Path) -> bytes:
    """Of a model card without the folder of the run, which its command names."""
    content = file.read_bytes()
    return re.sub(rb"output_dir=\S+", b"", content) if file.name == "README.md" else content


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _checkpoints_differ(whole: Path, resumed: Path, damaged: bool) -> list[str]:
    before, after = ({path.name for path in run.glob("checkpoint-*")} for run in (whole, resumed))
    if damaged:
        after = {name for name in after if not name.endswith(".damaged")}
    found = [f"checkpoints left: {sorted(after)}, not {sorted(before)}"] if before != after else []
    for name in sorted(before & after):
        for path in sorted((whole / name).glob("*.safetensors")):
            other = resumed / name / path.name
            if not other.is_file() or other.read_bytes() != path.read_bytes():
                found.append(f"{name}/{path.name} is not bit-equal")
    return found


def _leftovers(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if path.name.endswith((".writing", ".part", ".tmp")))


def _rows_differ(whole: Path, resumed: Path) -> list[str]:
    before, after = _rows(whole), _rows(resumed)
    keys_before = [(row.get("kind"), row.get("step")) for row in before]
    keys_after = [(row.get("kind"), row.get("step")) for row in after]
    if sorted(map(str, keys_before)) != sorted(map(str, keys_after)):
        lost = [key for key in keys_before if keys_after.count(key) < keys_before.count(key)]
        doubled = [key for key in dict.fromkeys(keys_after) if keys_after.count(key) > keys_before.count(key)]
        return [f"metrics.jsonl: rows lost {lost}, rows too many {doubled}"]
    found = ["metrics.jsonl: rows in another order"] if keys_before != keys_after else []
    by_key = {(row.get("kind"), row.get("step")): row for row in after}
    for row in before:
        other = by_key[row.get("kind"), row.get("step")]
        if row != other:
            where = _first_difference(row, other)
            found.append(f"metrics.jsonl: the {row['kind']} row of step {row['step']} differs: {where}")
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            row = {"kind": "half a line", "step": line[:40]}
        rows.append({key: value for key, value in row.items() if not key.startswith(TIMED)})
    return rows


def _json_differs(whole: Path, resumed: Path, name: str) -> list[str]:
    # What is newer than the checkpoint of a resume is renamed, and written once more.
    before, after = (
        {file for file in _files(run / name) if ".aside" not in file} for run in (whole, resumed)
    )
    if before != after:
        return [f"{name} has the files {sorted(after)}, not {sorted(before)}"]
    found = []
    for file in sorted(before):
        first, second = (_untimed(_read(run / name / file)) for run in (whole, resumed))
        if first != second:
            found.append(f"{name}/{file} differs: {_first_difference(first, second)}")
    return found


def _read(path: Path) -> Any:
    if not path.is_file():
        return None
    if path.suffix == ".npz":
        return _tokens(path)
    text = path.read_text(encoding="utf-8", errors="replace")  # it may have been damaged
    try:
        return (
            [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
        )
    except ValueError:
        return text.splitlines()


def _tokens(path: Path) -> Any:
    """The arrays of a token log, its description as JSON."""
    try:
        with np.load(path) as arrays:
            content = {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, zipfile.BadZipFile):
        return path.read_bytes()
    description = json.loads(content.pop("description").tobytes())
    return {**{name: array.tobytes() for name, array in content.items()}, "description": description}


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _untimed(entry) for key, entry in value.items() if key not in TIMED_KEYS}
    return [_untimed(entry) for entry in value] if isinstance(value, list) else value


def _first_difference(before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            if before.get(key) != after.get(key):
                return f"{key}: {_first_difference(before.get(key), after.get(key))}"
    if isinstance(before, list) and isinstance(after, list):
        for place, (first, second) in enumerate(zip(before, after, strict=False)):
            if first != second:
                return f"[{place}] {_first_difference(first, second)}"
        return f"{len(after)} entries, not {len(before)}"
    return f"{str(after)[:80]!r}, not {str(before)[:80]!r}"
