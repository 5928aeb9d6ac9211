"""Rows of a data set: from a file, a folder or the hub; their columns; the fraction held out for evaluation.

`row_files.py` reads files; the tasks interpret the columns. Every error is one sentence.
"""

import logging
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from whetstone.config.row_settings import SOURCE_KEYS
from whetstone.errors import UserError, did_you_mean
from whetstone.rewards.answers import final_answer
from whetstone.seeds import seed
from whetstone.tasks.prompts import conversation
from whetstone.tasks.row_files import SUFFIXES, Row, check_rows, read_file, read_folder, short_repr

__all__ = ["SOURCE_KEYS", "Row", "short_repr"]
DEFAULT_EVAL_FRACTION = 0.05
PROMPT_COLUMNS = ("question", "problem", "prompt", "messages", "query", "instruction", "input")
SOLUTION_COLUMNS = ("completion", "solution", "response", "output", "chosen")
ANSWER_COLUMNS = ("ground_truth", "answer", "solution", "final_answer", "target", "label")
logger = logging.getLogger(__name__)


def source(settings: dict[str, Any], side: str) -> tuple[str, str | None, str]:
    """Where one side's rows ("train", "eval") come from: (file or hub name, hub configuration, split). A
    file has no splits.
    """
    source_name = settings.get("path") or settings.get("dataset")
    split = settings.get("split") or "train"
    if side == "eval":
        source_name = settings.get("eval_path") or source_name
        split = settings.get("eval_split") or split
    source_name = str(Path(str(source_name)))
    return source_name, settings.get("name"), "" if _is_file(Path(source_name)) else str(split)


def _is_file(path: Path) -> bool:
    if _too_long(path):
        return True  # `check_settings` complains
    looks_like_hub = path.is_dir() or re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path)) is not None
    return path.is_file() or (path.suffix.lower() in SUFFIXES and not path.is_dir()) or not looks_like_hub


def _too_long(path: Path) -> bool:
    """Whether no file can have that name, so that even asking for it is an error."""
    name = str(path)
    return "\0" in name or len(name) > 4000 or max(map(len, path.parts), default=0) > 255


def read(settings: dict[str, Any], side: str, task: str) -> list[Row]:
    """All rows of one side's source (`max_samples` of them in training)."""
    source_name, name, split = source(settings, side)
    path = Path(source_name)
    if _is_file(path):
        rows = read_file(path, task)
        unused = [key for key in ("name", "split", "eval_split") if settings.get(key)]
        if unused and side == "train":
            logger.info("%s has no splits, so %s has no effect.", short_repr(path), " and ".join(unused))
    elif path.is_dir():
        rows = read_folder(path, split, task)
    else:
        rows = _read_hub(source_name, name, split, task)
    if not rows:
        raise UserError(f"The data set {source_name} of task {task} has no rows: give one that does.")
    limit = settings.get("max_samples")
    # The limit is for the source that training uses; evaluation rows of their own have eval_num_samples.
    return rows[:limit] if limit and source(settings, side) == source(settings, "train") else rows


def _read_hub(source_name: str, name: str | None, split: str, task: str) -> list[Row]:
    import datasets
    import huggingface_hub

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it announces every retry
    if not _hub_resolves(huggingface_hub.constants.ENDPOINT):
        # Without a network the client would try for half a minute; what is in its cache can still be had.
        datasets.config.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
        huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        data = datasets.load_dataset(source_name, name, split=split)
    except Exception as error:  # the hub's client raises whatever its layers do
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"The hub data set {source_name} ({f'configuration {name}, ' if name else ''}split {split}) of "
            f"task {task} could not be loaded: "
            f"{reason.rstrip('.')}. Check its name and the network, or give a local file as `path`."
        ) from None
    rows = [dict(row) for row in data]  # type: ignore[arg-type]
    check_rows(rows, f"The hub data set {source_name} of task {task}")
    return rows


def _hub_resolves(endpoint: str) -> bool:
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # the proxy resolves names, not this machine
    try:
        socket.getaddrinfo(urlsplit(endpoint).hostname, None)
    except OSError:
        return False
    return True


def columns_of(rows: Sequence[Row]) -> list[str]:
    """The columns that occur in any row, in order of appearance."""
    return list(dict.fromkeys(str(name) for row in rows for name in row))


def pick_column(
    rows: Sequence[Row], column: str | None, defaults: Sequence[str], what: str, where: str
) -> str:
    """The column named in the config, or the first of the usual names that is there."""
    columns = columns_of(rows)
    if not columns:
        raise UserError(f"{where} has rows without any column: write one object with named columns per row.")
    if column is None:
        for name in defaults:
            if name in columns:
                return name
        raise UserError(
            f"{where} has no column {' or '.join(defaults)}: set {what} to one of its columns "
            f"({list_columns(columns)})."
        )
    if column not in columns:
        raise UserError(
            f"{where} has no column '{column}': set {what} to one of its columns ({list_columns(columns)})."
        )
    return column


def list_columns(names: list[str]) -> str:
    """Column names for a sentence: not too many, none that breaks the line."""
    shorter = [name if len(name) <= 60 and name.isprintable() else short_repr(name) for name in names]
    return ", ".join(shorter[:30]) + (", ..." if len(shorter) > 30 else "")


def check_settings(settings: dict[str, Any], known: tuple[str, ...], task: str) -> dict[str, Any]:
    """Settings of a task made of rows, or a complaint that names the wrong one."""
    for key in settings:
        if key not in known:
            raise UserError(
                f"The task {task} has no setting '{key}'{did_you_mean(key, known) or '.'} Its settings are: "
                f"{', '.join(known)}."
            )
    if not settings.get("path") and not settings.get("dataset"):
        raise UserError(f"The task {task} needs rows: set path=FILE, or dataset=HUB_NAME.")
    for key in ("path", "dataset", "name", "split", "eval_path", "eval_split"):
        value = settings.get(key)
        if value is not None and not isinstance(value, str | Path):
            raise UserError(
                f"The task {task} has {key} {short_repr(value)}: give a text, such as {key}=train."
            )
        if value is not None and _too_long(Path(value)):
            raise UserError(f"The task {task} has {key} {short_repr(value)}: no file can have that name.")
    for key, value in settings.items():
        if key.endswith("_column") and value is not None and not isinstance(value, str):
            raise UserError(f"The task {task} has {key} {short_repr(value)}: give the name of a column.")
    share = settings.get("eval_fraction", DEFAULT_EVAL_FRACTION)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise UserError(
            f"The task {task} has eval_fraction {short_repr(share)}: give a number between 0 and 1, such as "
            f"{DEFAULT_EVAL_FRACTION}."
        )
    limit = settings.get("max_samples")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise UserError(
            f"The task {task} has max_samples {short_repr(limit)}: give a whole number of at least 1, or "
            "leave it out."
        )
    return settings


def split_rows(
    rows: list[Any], questions: list[str], settings: dict[str, Any], split: str, shared: bool, where: str
) -> list[Any]:
    """One side's rows: all, or its part of a source that training and evaluation share."""
    if not shared:
        return rows
    indices = hold_out(questions, settings.get("eval_fraction", DEFAULT_EVAL_FRACTION), split)
    if not indices:
        raise UserError(
            f"{where} has too few different questions to train and evaluate on: give more rows, or an "
            "eval_path of its own."
        )
    return [rows[i] for i in indices]


def hold_out(questions: Sequence[str], share: float, side: str) -> list[int]:
    """Indices of the rows of one side. A question's side is decided by its hash, so that the same question
    is never on both.
    """
    hashes = {question: seed("hold out", " ".join(question.split())) for question in questions}
    threshold = int(share * 2**63)
    first = min(hashes.values())  # at least one question is kept for evaluation
    return [
        i
        for i, question in enumerate(questions)
        if (hashes[question] < threshold or hashes[question] == first) == (side == "eval")
    ]


def solution_text(row: Row, settings: dict[str, Any], prompt: str, answer: str | None) -> str | None:
    """What the assistant says in a row: `solution_column`, the end of its messages, a completion, a solution,
    or an answer with its working. None where there is none.
    """
    column = settings.get("solution_column")
    for name in (column,) if column else (prompt, *SOLUTION_COLUMNS, answer):
        text = _assistant_text(row.get(name), is_messages=name == prompt)
        if text and (name != answer or final_answer(text) != text):
            return _with_boxed_answer(text)
    return None


def _assistant_text(value: Any, *, is_messages: bool) -> str:
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content") if value[-1].get("role") == "assistant" else None
    elif is_messages:
        value = None
    return value.strip() if isinstance(value, str) else ""


def _with_boxed_answer(text: str) -> str:
    """A worked solution of GSM8K's form (`<<1+1=2>>`, `#### 2`) without annotations, its answer boxed."""
    text = re.sub(r"<<[^<>\n]*>>", "", text)
    match = re.search(r"\s*####\s*([^\n]+)$", text)
    return text if match is None else f"{text[: match.start()]}\n\\boxed{{{match[1].strip()}}}"


def question_text(value: Any) -> str:
    """A cell as text; of chat messages the last that is to be answered."""
    if isinstance(value, list) and value and isinstance(value[0], dict):  # chat messages
        messages = conversation(value)
        value = messages[-1]["content"] if messages else None
    return "" if value is None else str(value).strip()
