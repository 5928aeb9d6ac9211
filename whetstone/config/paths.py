"""Checks of names that become folders and of sinks of metrics. Reads nothing from disk."""

from pathlib import PurePosixPath
from typing import Any

from whetstone.config.yaml_text import shorten

SINKS = ("wandb", "tensorboard", "trackio")
_MAX_BYTES = 255  # of one name in a file system


def check_run_name(name: Any) -> Any:
    """A run name that stays inside output_dir; numbers are taken as text."""
    if name is None or isinstance(name, bool):
        return name
    if isinstance(name, int | float):
        name = str(name)
    if not isinstance(name, str) or name == "":
        return name
    if not name.isprintable() or not name.strip():
        raise ValueError("write a name of printable characters, for it becomes a folder inside output_dir")
    parts = name.split("/")
    if PurePosixPath(name).is_absolute() or {"", ".", ".."} & set(parts) or "\\" in name:
        raise ValueError(
            f"{shorten(name)!r} would leave output_dir: write a plain name, and set output_dir to where the "
            "run should be"
        )
    if any(len(part.encode(errors="replace")) > _MAX_BYTES for part in parts):
        raise ValueError(f"the name has {len(name):,} characters, more than a folder may have: shorten it")
    return name


def check_sinks(value: Any) -> Any:
    """`report_to` as a list of known sinks."""
    if not isinstance(value, str | list | tuple | None):
        raise ValueError(f"write a name or a list of {', '.join(SINKS)}, or none")
    names = [] if value is None else [value] if isinstance(value, str) else list(value)
    names = [name.strip().lower() for entry in names for name in str(entry).split(",") if name.strip()]
    if names == ["all"]:
        return list(SINKS)
    names = [name for name in names if name != "none"]
    for name in names:
        if name not in SINKS:
            raise ValueError(f"report_to has no '{shorten(name)}': choose from {', '.join(SINKS)} or none")
    return list(dict.fromkeys(names))


def as_texts(value: Any) -> Any:
    """A list of texts from a list, or from one text with commas."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list):
        return [] if value is None else value
    return [str(entry).strip() for entry in value if str(entry).strip()]
