"""Folders that appear complete or not at all: write under a temporary name, fsync, rename."""

import logging
import os
import shutil
from pathlib import Path

from whetstone.model.manifest import CARD, NAME, Damage, check_sizes, damaged_files, read_manifest

logger = logging.getLogger("whetstone")


def move_aside(path: Path, ending: str = "aside") -> Path:
    """Rename what is in the way, so that nothing is lost; returns the new path."""
    return path.rename(free_path(path.with_name(f"{path.name.lstrip('.')}.{ending}")))


def free_path(path: Path) -> Path:
    """`path`, or `path-2` and so on where it exists."""
    free, number = path, 1
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def temp_dir(folder: Path, ending: str) -> Path:
    return folder.with_name(f".{folder.name}.{ending}")


def clear_temp(path: Path) -> Path:
    """Delete a temporary folder that a killed run left; anything else of its name is moved aside."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        logger.warning(f"{path} was in the way and is now {move_aside(path).name}.")
    return path


def delete(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def share_files(folder: Path) -> None:
    """Give files the read permission of their folder: safetensors creates them for their owner alone.

    The umask can't be read in a thread without changing it.
    """
    allowed = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode | allowed)


def publish(aside: Path, folder: Path) -> None:
    """Rename a complete temporary folder to its final name, atomically and durably."""
    share_files(aside)
    for path in (*aside.rglob("*"), aside):  # on disk before the rename
        if path.is_file() or path.is_dir():
            _fsync(path)
    old = None
    if os.path.lexists(folder):
        if _is_unchanged(folder):
            old = clear_temp(temp_dir(folder, "deleting"))
            folder.rename(old)
        else:
            logger.warning(f"{folder} is not as it was written: it is now {move_aside(folder).name}.")
    os.replace(aside, folder)
    _fsync(folder.parent)
    if old is not None:
        delete(old)


def _is_unchanged(folder: Path) -> bool:
    """Whether the folder has exactly the files of its manifest, unchanged."""
    if folder.is_symlink():
        return False
    try:
        manifest = read_manifest(folder)
        check_sizes(folder, manifest)
    except Damage:
        return False
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    return there - {CARD} == {*manifest.files, NAME} and not damaged_files(folder, manifest)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
