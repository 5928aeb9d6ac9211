"""Tasks made of rows of a data set: from a file, a folder or the hub; a fraction is held out to evaluate."""

import contextlib
import importlib
import json
import logging
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from whetstone.config import recipe_folders
from whetstone.config.data_keys import ROW_SETTINGS
from whetstone.config.plugins import is_plugin
from whetstone.errors import UserError, first_line
from whetstone.rewards.answers import final_answer
from whetstone.seeds import seed
from whetstone.tasks.base import Task, check_setting_names
from whetstone.tasks.prompts import conversation
from whetstone.tasks.row_files import SUFFIXES, Row, check_rows, read_file, read_folder, short_repr

__all__ = ["Row", "short_repr"]
DEFAULT_EVAL_FRACTION = 0.05
_TEXT_KEYS = ("path", "dataset", "name", "split", "eval_path", "eval_split")
_PROMPT_PARTS = frozenset(
    {"choices", "options", "tools", "A"}
)  # columns without which a question is another one
SOLUTION_COLUMNS = ("completion", "solution", "response", "output", "chosen")
logger = logging.getLogger(__name__)


class RowTask(Task):
    """A task made of rows. They are read at first use, never by a scoring worker."""

    @cached_property
    def _where(self) -> str:
        return f"The data set {source(self.settings, self.split)[0]} of task {self.name}"

    @cached_property
    def _raw(self) -> list[Row]:
        return read(self.settings, self.split, self.name)

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        """The rows of this split, as `problem` needs them."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._rows)

    def _column(self, setting: str, defaults: Sequence[str], alias: str = "") -> str:
        """The column that a setting (or its alias) names, or the first of the usual names that is there."""
        column = self.settings.get(setting)
        column = column if column or not alias else self.settings.get(alias)
        columns, where = columns_of(self._raw), self._where
        if not columns:
            raise UserError(
                f"{where} has rows without any column: write one object with named columns per row."
            )
        for name in defaults if column is None else (column,):
            if name in columns:
                return name
        name, known = " or ".join(defaults) if column is None else f"'{column}'", list_columns(columns)
        raise UserError(f"{where} has no column {name}: set {setting} to one of its columns ({known}).")

    def _name_unused(self, used: Iterable[str | None]) -> None:
        """Name once what nobody reads: columns, and fields of messages; raise where a prompt lacks a part."""
        used, is_chosen = set(used), bool({"prompt_column", "question_column"} & self.settings.keys())
        if self.split != "train":
            return
        names = columns_of(self._raw)
        cells = [row.get(name) for row in self._raw for name in names if name in used]
        parts = [part for cell in cells if isinstance(cell, list) for part in cell if isinstance(part, dict)]
        turns = [part for part in parts if "role" in part]
        fields = {str(key) for turn in turns for key, value in turn.items() if value}
        filled = {name for row in self._raw for name in names if row.get(name) not in (None, "", [], {})}
        lost = [name for name in names if name in _PROMPT_PARTS & filled - used and not is_chosen]
        if missing := fields & {"tool_calls"} or set(lost):
            raise UserError(
                f"{self._where} has {min(missing)}, which prompts would lack: write it into their text"
                + (", or set prompt_column to train without that column." if missing == set(lost) else ".")
            )
        unused = [f"column {name}" for name in names if name not in used]
        if any(map(is_plugin, self.config.tasks.reward_funcs)):
            unused = []  # reward functions of the user's own get all columns
        unused += sorted(f"message field {field}" for field in fields - {"role", "content"})
        if unused:
            logger.warning("%s: nothing uses %s", self._where, list_columns(unused))

    def _own_side(self, rows: list[Any], questions: list[str]) -> list[Any]:
        """All rows, or this split's part of a source that training and evaluation share.

        A question's side is decided by its hash, so that the same question is never on both.
        """
        if not self.shared:
            return rows
        hashes = [seed("hold out", " ".join(question.split())) for question in questions]
        threshold = int(self.settings.get("eval_fraction", DEFAULT_EVAL_FRACTION) * 2**63)
        first = min(hashes)  # at least one question is kept for evaluation
        is_held_out = [value < threshold or value == first for value in hashes]
        own = [row for row, out in zip(rows, is_held_out, strict=True) if out == (self.split == "eval")]
        if not own:
            raise UserError(
                f"{self._where} has too few different questions to train and evaluate on: give more rows, or "
                "an eval_path of its own."
            )
        return own


def row_settings(kind: str) -> dict[str, Any]:
    """Setting -> default; None where a column is found by its name or a source is chosen."""
    defaults = {"split": "train", "eval_fraction": DEFAULT_EVAL_FRACTION, "continue_starter": False}
    return {key: defaults.get(key) for key in ROW_SETTINGS[kind]}


def source(settings: dict[str, Any], side: str) -> tuple[str, str | None, str]:
    """Where the rows of "train" or "eval" come from: (file or hub name, hub configuration, split or "")."""
    source_name = settings.get("path") or settings.get("dataset")
    if side == "eval":
        source_name = settings.get("eval_path") or source_name
    source_name = str(Path(str(source_name)))
    splits = list(entry["rows"]) if (entry := known(source_name)) else []
    split = settings.get("split") or (splits or ["train"])[0]
    if side == "eval":
        split = settings.get("eval_split") or (splits or [split])[-1]
    return source_name, settings.get("name"), "" if _is_file(Path(source_name)) else str(split)


def known(name: str) -> dict[str, Any] | None:
    """The data set of a name in config/datasets.json; None where a folder of that name is here.

    `revision` is a commit, so that a copy in the hub's cache needs no network.
    """
    entry = json.loads((recipe_folders()[0] / "datasets.json").read_text("utf-8")).get(name)
    return None if entry is None or Path(name).is_dir() else entry


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
    from huggingface_hub import constants, hf_hub_download

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it announces every retry
    is_online = _hub_resolves(constants.ENDPOINT)
    remedy, entry = "Check its name and the network, or give a local file as `path`.", known(source_name)
    try:
        if entry and not name:
            file, revision, splits = entry["file"].format(split), entry["revision"], list(entry["rows"])
            command = f"hf download {entry['repository']} --repo-type dataset --revision {revision}"
            remedy = (
                f"Where there is a network, run `{command} --local-dir data/{source_name}`, then set "
                f"path={Path('data', source_name, file).parent} split={splits[0]} eval_split={splits[-1]}."
            )
            where = {"repo_type": "dataset", "revision": revision, "local_files_only": not is_online}
            rows = read_file(Path(hf_hub_download(entry["repository"], file, **where)), task)
            if len(rows) != (count := entry["rows"].get(split)):
                logger.warning("%s has %d rows in split %s, not %s.", source_name, len(rows), split, count)
            return rows
        import datasets

        with contextlib.nullcontext() if is_online else _offline():
            data = datasets.load_dataset(source_name, name, split=split)
    except Exception as error:  # the hub's client raises whatever its layers do
        reason = first_line(error) if is_online or not entry else "no network, and no copy in the hub's cache"
        raise UserError(
            f"The hub data set {source_name} ({f'configuration {name}, ' if name else ''}split {split}) of "
            f"task {task} could not be loaded: {reason}. {remedy}"
        ) from None
    return check_rows([dict(row) for row in data], f"The hub data set {source_name} of task {task}")  # type: ignore[arg-type]


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Inside, the hub's clients use their caches alone: without a network they try for half a minute."""
    modules = [importlib.import_module(name) for name in ("datasets.config", "huggingface_hub.constants")]
    before = [module.HF_HUB_OFFLINE for module in modules]
    for module in modules:
        vars(module)["HF_HUB_OFFLINE"] = True
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            vars(module)["HF_HUB_OFFLINE"] = value


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


def list_columns(names: list[str]) -> str:
    """Column names for a sentence: not too many, none that breaks the line."""
    shorter = [name if len(name) <= 60 and name.isprintable() else short_repr(name) for name in names]
    return ", ".join(shorter[:30]) + (", ..." if len(shorter) > 30 else "")


def check_settings(settings: dict[str, Any], known: Iterable[str], task: str) -> None:
    """Raise on a setting of a task made of rows that is unknown or has a wrong value."""
    check_setting_names(settings, tuple(known), task)
    if not settings.get("path") and not settings.get("dataset"):
        raise UserError(f"The task {task} needs rows: set path=FILE, or dataset=HUB_NAME.")
    for key, value in settings.items():
        if (value is not None or key == "eval_fraction") and (remedy := _remedy(key, value)):
            raise UserError(f"The task {task} has {key} {short_repr(value)}: {remedy}.")


def _remedy(key: str, value: Any) -> str | None:
    """What to write instead of a wrong value; None for a right one."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if key in _TEXT_KEYS and not isinstance(value, str | Path):
        return f"give a text, such as {key}=train"
    if key in _TEXT_KEYS and _too_long(Path(str(value))):
        return "no file can have that name"
    if key.endswith("_column") and not isinstance(value, str):
        return "give the name of a column"
    if key == "eval_fraction" and not 0 < number < 1:
        return f"give a number between 0 and 1, such as {DEFAULT_EVAL_FRACTION}"
    if key == "max_samples" and not (isinstance(number, int) and number >= 1):
        return "give a whole number of at least 1, or leave it out"
    return None


def solution_text(row: Row, settings: dict[str, Any], prompt: str, answer: str | None) -> str | None:
    """What the assistant says in a row: `solution_column`, the end of its messages, a completion, a solution,
    or an answer with its working. None where there is none.
    """
    column = settings.get("solution_column")
    names = [column] if column else [prompt, *SOLUTION_COLUMNS, *([answer] if answer else [])]
    for name in names:
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
    match = re.search(r"\s*####\s*([-+]?[$€£]?\d[\d,.]*(?:/\d+)?\s?%?)\s*$", text)
    if match is None:
        return text  # other solutions are trained on as they are
    working = re.sub(r"<<[\d\s.,+*/()=%$-]*>>", "", text[: match.start()])
    return f"{working}\n\\boxed{{{match[1].strip()}}}"


def question_text(value: Any) -> str:
    """A cell as text; of chat messages the last that is to be answered."""
    if isinstance(value, list) and value and isinstance(value[0], dict):  # chat messages
        messages = conversation(value)
        value = messages[-1]["content"] if messages else None
    return "" if value is None else str(value).strip()
