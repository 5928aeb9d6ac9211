"""Rows of a data set: from a JSON, JSONL, CSV, TSV or parquet file, or from a hub data set; and the share
of them kept for evaluation.

Reads and sorts; what the columns mean is the task's business. Everything a user can get wrong ends in one
sentence.
"""

import csv
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from whetstone.errors import UserError
from whetstone.seeds import seed

Row = dict[str, Any]
SOURCE_KEYS = ("path", "dataset", "name", "split", "eval_path", "eval_split", "eval_share", "max_samples")
_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")


def source(settings: dict[str, Any], side: str) -> tuple[str, str | None, str]:
    """Where one side's rows ("train", "eval") come from: (file or hub name, hub configuration, hub split)."""
    place = settings.get("path") or settings.get("dataset")
    split = settings.get("split") or "train"
    if side == "eval":
        place = settings.get("eval_path") or place
        split = settings.get("eval_split") or split
    return str(Path(str(place))), settings.get("name"), str(split)


def read(settings: dict[str, Any], side: str, task: str) -> list[Row]:
    """All rows of one side's source (`max_samples` of them in training)."""
    place, name, split = source(settings, side)
    path = Path(place)
    looks_like_hub = path.is_dir() or re.fullmatch(r"[\w.-]+(/[\w.-]+)?", place) is not None
    is_file = path.is_file() or path.suffix.lower() in _SUFFIXES or not looks_like_hub
    rows = read_file(path, task) if is_file else _read_hub(place, name, split, task)
    if not rows:
        raise UserError(f"The data set {place} of task {task} has no rows: give one that does.")
    limit = settings.get("max_samples")
    # The limit is for the source that training uses; evaluation rows of their own have eval_num_samples.
    return rows[:limit] if limit and source(settings, side) == source(settings, "train") else rows


def read_file(path: Path, task: str) -> list[Row]:
    """The rows of a local file, by its ending."""
    if not path.is_file():
        raise UserError(
            f"The task {task} names the file {path}, which is not there: check `path` (it is relative to "
            f"{Path.cwd()})."
        )
    readers: dict[str, Callable[[Path], list[Row]]] = {
        ".json": _read_json,
        ".jsonl": _read_jsonl,
        ".ndjson": _read_jsonl,
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".parquet": _read_parquet,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UserError(
            f"The task {task} names {path}, whose kind is not known: give one that ends in "
            f"{', '.join(_SUFFIXES)}."
        )
    try:
        rows = reader(path)
    except (ValueError, OSError, csv.Error) as error:  # ValueError: JSON, Unicode and Arrow errors
        raise UserError(
            f"The file {path} of task {task} is not readable as {path.suffix[1:]}: {error}."
        ) from None
    if any(not isinstance(row, dict) for row in rows):
        raise UserError(
            f"The file {path} of task {task} holds entries that are not rows with named columns: write one "
            "object per row."
        )
    return rows


def _read_json(path: Path) -> list[Row]:
    data = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(data, dict):  # {"data": [...]}, or a list under any one name, or columns
        lists = [value for value in data.values() if isinstance(value, list)]
        if len(lists) == 1 and all(isinstance(row, dict) for row in lists[0]):
            return lists[0]
        if lists and len(lists) == len(data) and len({len(values) for values in lists}) == 1:
            return [dict(zip(data, values, strict=True)) for values in zip(*lists, strict=True)]
        raise ValueError("it holds one object, not a list of rows")
    if not isinstance(data, list):
        raise ValueError(f"it holds a {type(data).__name__}, not a list of rows")
    return data


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}: {error}") from None
    return rows


def _read_csv(path: Path) -> list[Row]:
    csv.field_size_limit(
        min(sys.maxsize, 2**31 - 1)
    )  # worked solutions are longer than the default of 128 kB
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","))


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()


def _read_hub(place: str, name: str | None, split: str, task: str) -> list[Row]:
    import datasets

    try:
        data = datasets.load_dataset(place, name, split=split)
    except Exception as error:  # the hub's client raises whatever its layers do
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"The hub data set {place} ({f'configuration {name}, ' if name else ''}split {split}) of task "
            f"{task} could not be loaded: "
            f"{reason.rstrip('.')}. Check its name and the network, or give a local file as `path`."
        ) from None
    return [dict(row) for row in data]  # type: ignore[arg-type]


def pick_column(
    rows: Sequence[Row], wanted: str | None, defaults: Sequence[str], what: str, where: str
) -> str:
    """The column named in the config, or the first of the usual names that is there."""
    there = list(rows[0])
    if wanted is None:
        for name in defaults:
            if name in there:
                return name
        raise UserError(
            f"{where} has no column {' or '.join(defaults)}: set {what} to one of its columns "
            f"({', '.join(there)})."
        )
    if wanted not in there:
        raise UserError(
            f"{where} has no column '{wanted}': set {what} to one of its columns ({', '.join(there)})."
        )
    return wanted


def hold_out(questions: Sequence[str], share: float, side: str) -> list[int]:
    """Indices of the rows of one side. A question's side is decided by its hash, so that the same question
    is never on both.
    """
    places = {question: seed("hold out", " ".join(question.split())) for question in questions}
    threshold = int(share * 2**63)
    first = min(places.values())  # at least one question is kept for evaluation
    return [
        i
        for i, question in enumerate(questions)
        if (places[question] < threshold or places[question] == first) == (side == "eval")
    ]
