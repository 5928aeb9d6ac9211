"""Find the checkpoint to resume from, and verify its checksums."""

import time
from dataclasses import dataclass
from pathlib import Path

from whetstone.errors import UserError
from whetstone.model.manifest import Manifest, damaged_files, read_manifest
from whetstone.parallel.collectives import all_gather_objects, run_on_main
from whetstone.parallel.mesh import SINGLE, Ranks
from whetstone.run.checkpoint import Checkpoint, complete_checkpoints
from whetstone.run.checkpoint_folder import named_checkpoints, why_incomplete
from whetstone.terminal.display import say
from whetstone.terminal.text import size

ANNOUNCE_BYTES = 2 * 10**9  # verification that takes a second or more is announced


@dataclass(frozen=True, kw_only=True)
class Search:
    """The checkpoint to resume from (None: start a new run), and newer ones that are damaged."""

    checkpoint: Checkpoint | None
    damaged: dict[Path, str]  # folder -> why it can't be used
    notes: tuple[str, ...] = ()


def find_checkpoint(
    run: Path, *, resume_from: str | bool | None, auto_resume: bool, ranks: Ranks = SINGLE
) -> Search:
    """The named checkpoint, or with `auto_resume` the newest complete one. All ranks verify a share of it."""
    damaged: dict[Path, str] = {}
    named = isinstance(resume_from, str) and resume_from.lower() not in ("true", "false", "")
    explicit = named or resume_from is True or str(resume_from).lower() == "true"
    if not explicit and not auto_resume:
        return Search(checkpoint=None, damaged=damaged)
    if named:
        folder = Path(str(resume_from))
        candidates = [folder if folder.is_dir() else run / folder]
    else:
        candidates = run_on_main(ranks, lambda: named_checkpoints(run), to_all=True) or []
    for folder in candidates:
        started = time.monotonic()
        reason, manifest = verify(folder, ranks)
        if reason is None and manifest is not None:
            seconds = time.monotonic() - started
            note = f"Verified {folder.name}: {size(manifest.num_bytes)} in {seconds:.1f} s."
            checkpoint = Checkpoint(folder=folder, step=manifest.step)
            return Search(checkpoint=checkpoint, damaged=damaged, notes=(note,))
        damaged[folder] = str(reason)
    if named:
        there = ", ".join(sorted(path.folder.name for path in complete_checkpoints(run))) or "none"
        raise UserError(
            f"resume_from_checkpoint: {candidates[0]} can't be used, since {damaged[candidates[0]]}. Whole "
            f"checkpoints of this run: {there}."
        )
    if explicit or damaged:
        reasons = "; ".join(f"{folder.name}: {reason}" for folder, reason in damaged.items())
        raise UserError(
            f"{run} holds no whole checkpoint to go on from{f' ({reasons})' if reasons else ''}: name one "
            "(resume_from_checkpoint), or start over with auto_resume=false overwrite_output_dir=true (the "
            "old run is moved aside)."
        )
    return Search(checkpoint=None, damaged=damaged)


def verify(folder: Path, ranks: Ranks) -> tuple[str | None, Manifest | None]:
    """Why a checkpoint can't be used (None: it can), and its manifest. All ranks hash a share of it."""

    def inspect() -> tuple[str | None, Manifest | None]:
        reason = why_incomplete(folder)
        return reason, None if reason else read_manifest(folder)

    reason, manifest = run_on_main(ranks, inspect, to_all=True) or (None, None)
    if manifest is None:
        return reason, None
    if manifest.num_bytes >= ANNOUNCE_BYTES and ranks.is_main:
        say(f"Verifying {size(manifest.num_bytes)} of {folder.name} ...")
    local = damaged_files(folder, manifest, part=ranks.rank, num_parts=ranks.world_size)
    wrong = sorted({name for names in all_gather_objects(ranks, local) for name in names})
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"its file {wrong[0]}{more} is damaged (the checksum differs)", None
    return None, manifest
