"""Reads rows from JSON, JSONL, CSV, TSV and parquet files, folders of such files, and folders of `datasets`.

Checks that every row is plain data: named columns, valid Unicode, limited nesting. Errors name line or row.
"""

import csv
import io
import itertools
import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whetstone.errors import UserError

Row = dict[str, Any]
logger = logging.getLogger(__name__)
SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
_LONGEST_LINE = 64 * 2**20  # bytes of one JSONL line
_LARGEST_JSON = 4 * 2**30  # bytes of a JSON file, which is parsed in one piece
_DEEPEST = 32  # nested lists and objects in a row; deeper ones break pickle and JSON further on
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "state.json")
_SPLIT_NAMES = {"validation": ("validation", "valid", "val", "dev"), "test": ("test", "testing", "eval")}


def short_repr(value: Any) -> str:
    """A value in one short line, for a sentence."""
    text = repr(value) if not isinstance(value, Path) else str(value)
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= 60 or isinstance(value, Path) else f"{text[:60]}..."


def read_file(path: Path, task: str) -> list[Row]:
    """The rows of a local file, by its ending."""
    name = f"{short_repr(path)} of task {task}"
    if not path.is_file():
        reason = "is not a regular file" if path.exists() else "is not there"
        raise UserError(
            f"The task {task} names the file {short_repr(path)}, which {reason}: check `path` (it is "
            f"relative to {Path.cwd()})."
        )
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(
            f"The task {task} names {short_repr(path)}, whose kind is not known: give one that ends in "
            f"{', '.join(SUFFIXES)}."
        )
    try:
        if path.stat().st_size == 0:
            raise ValueError("it is empty")
        rows = reader(path)
    except MemoryError:
        raise UserError(f"The file {name} does not fit into memory: give a smaller one.") from None
    except Exception as error:  # parsers of other projects on arbitrary bytes raise whatever they like
        raise UserError(f"The file {name} is not readable as {path.suffix[1:]}: {_reason(error)}.") from None
    return check_rows(rows, f"The file {name}")


def _reason(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:300].rstrip(".")


def check_rows(rows: list[Any], where: str) -> list[Row]:
    """The rows, where each is an object whose text can be encoded and whose nesting ends."""
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(
                f"{where} has {short_repr(row)} in row {number}, and such entries are not rows with named "
                "columns: write one object per row."
            )
        fault = _fault(row, _DEEPEST)
        if fault:
            raise UserError(f"{where} has {fault} in row {number}: mend or remove that row.")
    return rows


def _fault(value: Any, depth: int) -> str | None:
    if isinstance(value, str):
        if value.isascii():
            return None
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            return f"half a character (the lone surrogate {short_repr(value[error.start])})"
        return None
    if isinstance(value, dict | list | tuple):
        if depth == 0:
            return f"lists or objects nested deeper than {_DEEPEST}"
        entries = itertools.chain(value.keys(), value.values()) if isinstance(value, dict) else value
        return next((fault for entry in entries if (fault := _fault(entry, depth - 1))), None)
    return None


def parse_plain(value: Any) -> Any:
    """The list or object that a cell holds as JSON text, as CSV files have it; any other value as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return value if _fault(parsed, _DEEPEST) else parsed


def _decode(text: bytes) -> str:
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        remedy = "save it as UTF-8 (iconv -f cp1252 or utf-16 -t utf-8 OLD > NEW)"
        raise ValueError(f"byte {error.start + 1} is not UTF-8 text: {remedy}") from None


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(_decode(text))
    except RecursionError:
        raise ValueError(f"{where}it is nested too deeply") from None
    except ValueError as error:  # no JSON, or a number of thousands of digits
        raise ValueError(f"{where}{error}{where and ' (write one object per line)'}") from None


def _read_json(path: Path) -> list[Row]:
    if path.stat().st_size > _LARGEST_JSON:
        raise ValueError(f"it is larger than {_LARGEST_JSON >> 30} GB: write JSONL or parquet instead")
    first, _, rest = (text := path.read_bytes()).partition(b"\n")
    if first.startswith(b"{") and first.rstrip().endswith(b"}") and rest.strip():
        return _read_jsonl(path)
    data = _parse(text, "")
    if isinstance(data, dict):  # {"data": [...]}, or a list under any one name, or columns
        lists = [value for value in data.values() if isinstance(value, list)]
        if len(lists) == 1 and all(isinstance(row, dict) for row in lists[0]):
            if unused := [key for key, value in data.items() if value is not lists[0]]:
                logger.warning("%s: nothing uses its keys %s", path.name, ", ".join(unused)[:200])
            return lists[0]
        if lists and len(lists) == len(data) and len({len(values) for values in lists}) == 1:
            return [dict(zip(data, values, strict=True)) for values in zip(*lists, strict=True)]
        raise ValueError("it holds one object, not a list of rows (pandas: orient='records')")
    if not isinstance(data, list):
        raise ValueError(f"it holds a {type(data).__name__}, not a list of rows")
    return data


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    with path.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(_LONGEST_LINE + 1)
            if not line:
                break
            if len(line) > _LONGEST_LINE:
                raise ValueError(f"line {number} is longer than {_LONGEST_LINE >> 20} MB")
            if line.strip():
                rows.append(_parse(line, f"line {number}: "))
    return rows


def _read_csv(path: Path) -> list[Row]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # worked solutions are longer than 128 kB
    text = _decode(path.read_bytes())
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(f"line {line} holds a NUL byte: it is no text file, or not UTF-8")
    names = text.partition("\n")[0]
    separator = "\t" if path.suffix.lower() == ".tsv" else max(",", ";", "\t", key=names.count)
    rows: list[Row] = []
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        filled = filter(None, reader)
        header = next(filled, [])
        twice = next((name for name in header if header.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"its header names the column {short_repr(twice)} twice")
        for cells in filled:
            if len(cells) > len(header):
                raise ValueError(f"line {reader.line_num} has {len(cells)} cells for {len(header)} columns")
            rows.append(dict(itertools.zip_longest(header, cells)))
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from None
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()


_READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}


def read_folder(folder: Path, split: str, task: str) -> list[Row]:
    """One split of a local folder: saved by `datasets`, or data files whose names tell the split."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _read_saved(folder, split, task)
    files = _files_of_split(folder, split, task)
    kinds = sorted({path.suffix.lower() for path in files})
    if len(kinds) > 1:
        raise UserError(
            f"The folder {short_repr(folder)} of task {task} holds files of several kinds "
            f"({', '.join(kinds)}) for split {split}, most likely the same rows twice: give one file as "
            "`path`."
        )
    return [row for path in files for row in read_file(path, task)]


def _files_of_split(folder: Path, split: str, task: str) -> list[Path]:
    splits = splits_of(folder)
    if not splits:
        raise UserError(
            f"The task {task} names the folder {short_repr(folder)}, which holds no data file (none that "
            f"ends in {', '.join(SUFFIXES)}): give a file, or a folder saved by `datasets`."
        )
    named = {name: paths for name, paths in splits.items() if name} or {"train": splits.get("", [])}
    if _usual(split) in named:
        return named[_usual(split)]
    raise _no_split(folder, split, named, task)


def splits_of(folder: Path) -> dict[str, list[Path]]:
    """The data files of a folder by their split, which is empty where the name of a file tells none."""
    splits: dict[str, list[Path]] = {}
    for source in (folder, folder / "data"):  # a hub repository keeps its files in the second
        for path in sorted(source.iterdir()) if source.is_dir() else ():
            if path.suffix.lower() in SUFFIXES and path.name not in _NOT_DATA and path.is_file():
                splits.setdefault(_split_of(path), []).append(path)
    return splits


def _usual(split: str) -> str:
    return next((name for name, others in _SPLIT_NAMES.items() if split in others), split)


def _split_of(path: Path) -> str:
    """The split in a file's name, train for `train-00000-of-00002.parquet`; empty without one."""
    name_parts = re.split(r"[^a-z]+", path.stem.lower())
    return next((_usual(word) for word in name_parts if _usual(word) in ("train", *_SPLIT_NAMES)), "")


def _no_split(source: Any, split: str, splits: Any, task: str) -> UserError:
    return UserError(
        f"{short_repr(source)} of task {task} has no split {short_repr(split)}, only "
        f"{', '.join(map(str, splits))}: set split and eval_split to one of these, or leave eval_split out; "
        "then a share of the training split is kept for evaluation."
    )


def _read_saved(folder: Path, split: str, task: str) -> list[Row]:
    import datasets

    where = f"The folder {short_repr(folder)} of task {task}"
    try:
        data = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever the layers below raise on a damaged folder
        raise UserError(f"{where} is not readable by `datasets`: {_reason(error)}.") from None
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise _no_split(folder, split, data, task)
        data = data[split]
    elif split != "train":
        raise _no_split(folder, split, ["train"], task)
    return check_rows([dict(row) for row in data], where)  # type: ignore[arg-type]
