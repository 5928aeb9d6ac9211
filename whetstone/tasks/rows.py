"""Tasks made of rows of a data set: from a file, a folder or the hub; a fraction is held out to evaluate."""

import contextlib
import importlib
import json
import logging
import os
import re
import socket
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from whetstone.config import recipe_folders
from whetstone.config.data_keys import ROW_SETTINGS
from whetstone.errors import UserError, first_line
from whetstone.seeds import seed
from whetstone.tasks.base import Task, check_setting_names
from whetstone.tasks.row_files import SUFFIXES, Row, check_rows, read_file, read_folder, short_repr
from whetstone.tasks.row_reader import Reader
from whetstone.terminal.text import counted
from whetstone.types import normal_form

__all__ = ["Row", "short_repr"]
DEFAULT_EVAL_FRACTION = 0.05
_TEXT_KEYS = ("path", "dataset", "name", "split", "eval_path", "eval_split")
logger = logging.getLogger(__name__)


class RowTask(Task):
    """A task made of rows. They are read at first use, never by a scoring worker."""

    why_left_out = "empty prompt or answer"
    _answer_kind = ""  # for a sentence about the rows

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

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self._raw, self.settings, self._where)

    def _own_side(self, rows: list[Any], questions: list[str]) -> list[Any]:
        """All rows, or this split's part of a source that training and evaluation share.

        A question's side is decided by its hash, so that the same question is never on both.
        """
        own = rows
        if self.shared:
            first_written: dict[str, str] = {}  # the side is that of a question's first spelling
            spelled = [first_written.setdefault(normal_form(text), text) for text in questions]
            hashes = [seed("hold out", " ".join(text.split())) for text in spelled]
            threshold = int(self.settings.get("eval_fraction", DEFAULT_EVAL_FRACTION) * 2**63)
            first = min(hashes)  # at least one question is kept for evaluation
            is_held_out = [value < threshold or value == first for value in hashes]
            own = [row for row, out in zip(rows, is_held_out, strict=True) if out == (self.split == "eval")]
        if not own:
            raise UserError(
                f"{self._where} has too few different questions to train and evaluate on: give more rows, or "
                "an eval_path of its own."
            )
        num_rows, uses = len(self._raw), ("to train on", "to evaluate")
        here, there = uses if self.split == "train" else uses[::-1]
        parts = [f"{len(own):,} {here}"] + [f"{len(rows) - len(own):,} {there}"] * self.shared
        parts += [f"{num_rows - len(rows):,} left out ({self.why_left_out})"] if num_rows > len(rows) else []
        self._note = (
            f"{self.name}: {counted(num_rows, 'row')} of {source(self.settings, self.split)[0]}: "
            f"{', '.join(parts)}; {self._reader.describe(self._answer_kind)}."
        )
        return own

    def notes(self) -> list[str]:
        """Where the rows come from, which columns were read and which were not."""
        return [] if self.generated or not len(self) else [self._note]


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
