"""The folders of checkpoints in a run folder: their names, and whether they are whole. Knows no torch."""

import re
from pathlib import Path

from whetstone.model.manifest import NAME, Damage, check_sizes, read_manifest

STATE = "state"
SCALARS = "scalars.pt"


def named_checkpoints(run: Path) -> list[Path]:
    """Everything named `checkpoint-N`, newest first."""
    paths = [path for path in run.glob("checkpoint-*") if re.fullmatch(r"checkpoint-[0-9]{1,18}", path.name)]
    return sorted(paths, key=lambda path: (int(path.name.rpartition("-")[2]), path.name), reverse=True)


def why_incomplete(folder: Path) -> str | None:
    """Why a folder is not a complete checkpoint; None if it is. Checksums are not verified."""
    try:
        manifest = read_manifest(folder)
        for name in (SCALARS, f"{STATE}/.metadata") if (folder / STATE).exists() else ():
            if name not in manifest.files:
                raise Damage(f"its {NAME} does not list {name}")
        check_sizes(folder, manifest)
    except Damage as damage:
        return str(damage)
    return None
