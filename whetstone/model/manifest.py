"""`whetstone.json`: the manifest of a checkpoint or model folder, with the checksum of every file in it.

A manifest is written last, so a folder that has one was complete. It names the step, and for every file its
size and the SHA-256 of its pieces of 64 MiB (one piece: what `sha256sum` prints). Pieces are hashed in
parallel, and several ranks can share the work. A checksum of the manifest shows damage to it. Knows no torch.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

NAME = "whetstone.json"
CARD = "README.md"  # not in the manifest: people edit the card of a model
PIECE = 64 * 2**20
BLOCK = 2**20
MAX_BYTES = 256 * 2**20  # of a manifest: 2**22 pieces are 256 TiB of files
MAX_STEP = 2**53


class Damage(ValueError):
    """Why a folder can't be used, as the end of a sentence: `its file X is missing`."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    size: int
    sha256: tuple[str, ...]  # one digest for each piece


@dataclass(frozen=True, kw_only=True)
class Manifest:
    step: int
    files: Mapping[str, Entry]
    seconds: float  # how long the run had taken

    @property
    def num_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())


def write_manifest(folder: Path, *, step: int, seconds: float = 0.0) -> None:
    """Seal a folder whose files are all there: hash them and write the manifest."""
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path not in (folder / NAME, folder / CARD)
    )
    sizes = {name: (folder / name).stat().st_size for name in names}
    digests = _hash(folder, _pieces(sizes), _digest)
    files = {
        name: {"size": size, "sha256": [digests[name, piece] for piece in range(_num_pieces(size))]}
        for name, size in sizes.items()
    }
    body: dict[str, Any] = {"step": step, "seconds": seconds, "files": files}
    text = json.dumps({**body, "checksum": _checksum(body)}, indent=1)
    part = folder / f".{NAME}.part"
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / NAME)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder; raises `Damage` where it is missing, broken or not for this folder."""
    path = folder / NAME
    if not folder.is_dir():
        raise Damage("there is no such folder")
    if not path.is_file():
        raise Damage(f"it has no {NAME}, so it is not a checkpoint of ours, or not a whole one")
    if path.stat().st_size > MAX_BYTES:
        raise Damage(f"its {NAME} is damaged (too large)")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        manifest = _parse(document)
    except (OSError, ValueError, RecursionError):  # not JSON, not UTF-8, digits without end, wrong types
        raise Damage(f"its {NAME} is damaged") from None
    prefix, _, number = folder.name.rpartition("-")
    if prefix == "checkpoint" and number.isdecimal() and int(number) != manifest.step:
        raise Damage(f"its {NAME} belongs to step {manifest.step}")
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise `Damage` where a file is missing or has another size. Reads no contents."""
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise Damage(f"its file {name} is missing")
        if path.stat().st_size != entry.size:
            raise Damage(f"its file {name} has another size than when it was written")


def damaged_files(
    folder: Path, manifest: Manifest, *, part: int = 0, num_parts: int = 1, skip: str | None = None
) -> list[str]:
    """Files whose contents differ from the manifest, but for those of the subfolder `skip`.

    Of `num_parts` that share the work, each looks at its own pieces.
    """
    files = manifest.files
    sizes = {n: entry.size for n, entry in files.items() if skip is None or not n.startswith(f"{skip}/")}
    digests = _hash(folder, list(_pieces(sizes))[part::num_parts], _digest_if_readable)
    return sorted({name for (name, piece), digest in digests.items() if digest != files[name].sha256[piece]})


def _parse(document: Any) -> Manifest:
    if not isinstance(document, dict) or not isinstance(document.get("files"), dict):
        raise ValueError
    step, seconds = document.get("step"), document.get("seconds", 0.0)
    if type(step) is not int or not 0 <= step <= MAX_STEP or type(seconds) not in (int, float):
        raise ValueError
    body = {key: value for key, value in document.items() if key != "checksum"}
    if not document["files"] or document.get("checksum") != _checksum(body):
        raise ValueError
    files = {name: _parse_entry(name, entry) for name, entry in document["files"].items()}
    return Manifest(step=step, files=files, seconds=float(seconds))


def _parse_entry(name: str, entry: Any) -> Entry:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts:
        raise ValueError
    if not isinstance(entry, dict):
        raise ValueError
    size, digests = entry.get("size"), entry.get("sha256")
    if type(size) is not int or size < 0 or not isinstance(digests, list):
        raise ValueError
    if len(digests) != _num_pieces(size) or not all(isinstance(digest, str) for digest in digests):
        raise ValueError
    return Entry(size=size, sha256=tuple(digests))


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _num_pieces(size: int) -> int:
    return max(1, -(-size // PIECE))


def _pieces(sizes: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    return ((name, piece) for name, size in sizes.items() for piece in range(_num_pieces(size)))


def _hash(
    folder: Path, pieces: Iterable[tuple[str, int]], digest: Callable[[Path, int], str]
) -> dict[tuple[str, int], str]:
    """The digest of every piece."""
    pieces = list(pieces)
    threads = min(8, os.cpu_count() or 1, len(pieces) or 1)  # hashlib lets go of the interpreter's lock
    with ThreadPoolExecutor(max_workers=threads) as pool:
        digests = pool.map(lambda piece: digest(folder / piece[0], piece[1] * PIECE), pieces)
        return dict(zip(pieces, digests, strict=True))


def _digest(path: Path, begin: int) -> str:
    digest, left = hashlib.sha256(), PIECE
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while left and (block := file.read(min(BLOCK, left))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _digest_if_readable(path: Path, begin: int) -> str:
    try:
        return _digest(path, begin)
    except OSError:  # no digest equals this
        return "unreadable"
