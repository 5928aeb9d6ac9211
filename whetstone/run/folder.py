"""The run folder: created for a new run, or reopened to resume. Nothing in it is overwritten silently."""

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from whetstone.config import Config, Plan, dump, flatten
from whetstone.config.base import Resume
from whetstone.config.load import resume_keys
from whetstone.errors import UserError
from whetstone.files import atomic_write
from whetstone.model.manifest import Damage, read_manifest
from whetstone.parallel.collectives import run_on_main
from whetstone.parallel.mesh import SINGLE, Ranks
from whetstone.run.atomic_folder import free_path, move_aside
from whetstone.run.checkpoint import Checkpoint
from whetstone.run.checkpoint_folder import SCALARS, named_checkpoints
from whetstone.run.checkpoint_search import Search, find_checkpoint
from whetstone.run.lock import RunLock
from whetstone.run.record import read_mapping

logger = logging.getLogger("whetstone")

RESUME_FIXED_KEYS, RESUME_SAFE_KEYS = resume_keys(Resume.FIXED), resume_keys(Resume.SAFE)
LENGTH_KEYS = ("max_steps", "num_train_epochs")


def run_dir(config: Config) -> Path:
    return Path(config.run.output_dir) / (config.run.run_name or "")


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder for the files of ranks other than the first."""
    with tempfile.TemporaryDirectory(prefix="whetstone-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def open_run(
    config: Config, stack: contextlib.ExitStack, ranks: Ranks = SINGLE, *, is_restart: bool = False
) -> tuple[Path, Checkpoint | None, list[str]]:
    """The run folder, the checkpoint to resume from (None: a new run), and notes. A collective call.

    Until `stack` closes, the folder is locked. `is_restart`: a launcher restarted the run after a failure, so
    it resumes whatever the settings say.
    """
    folder, run = run_dir(config), config.run
    lock = RunLock(folder)
    run_on_main(ranks, lambda: stack.enter_context(lock))  # before anything is looked at
    search = find_checkpoint(folder, resume_from=None, auto_resume=is_restart, ranks=ranks)
    if search.checkpoint is None:
        resume_from, auto_resume = run.resume_from_checkpoint, run.auto_resume
        search = find_checkpoint(folder, resume_from=resume_from, auto_resume=auto_resume, ranks=ranks)
    notes = run_on_main(ranks, lambda: _open(config, search, lock, is_restart=is_restart), to_all=True)
    return folder, search.checkpoint, notes or []


def _open(config: Config, search: Search, lock: RunLock, *, is_restart: bool) -> list[str]:
    """Prepare the folder for writing; returns notes for the user."""
    folder, resumed = run_dir(config), search.checkpoint
    notes = []
    if resumed is None and _is_used(folder):
        if not is_restart:
            ensure_unused(config)
        inside = (path.parent for path in folder.rglob("config.yaml") if path.parent != folder)
        # wandb, too, writes a config.yaml inside.
        if others := sorted(path for path in inside if (path / "run.json").is_file() or _is_used(path)):
            raise UserError(
                f"{folder} holds another run, and others in folders inside it ({others[0].name}), so it "
                "is not moved aside: set run_name, which makes a folder for this run alone."
            )
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(folder.stat().st_mtime))
        moved = folder.rename(free_path(folder.with_name(f"{folder.name}.{stamp}")))
        lock.renamed(moved)
        notes.append(f"The earlier run was moved to {moved}.")
    if resumed is not None:
        notes += search.notes
        notes += _clear_newer(folder, search)
        notes.append(f"Resuming from {resumed.folder} (step {resumed.step}).")
        notes += _compare(folder, config, resumed.step)
    notes += _clear_files(folder)
    atomic_write(folder / "config.yaml", dump(config))
    return notes


def ensure_unused(config: Config) -> None:
    """Raise if the folder holds another run, and neither resuming nor overwriting is configured."""
    run, folder = config.run, run_dir(config)
    resumes = run.auto_resume or str(run.resume_from_checkpoint or "false").lower() != "false"
    if _is_used(folder) and not (run.overwrite_output_dir or resumes):
        raise UserError(
            f"{folder} holds another run: choose another run_name, resume it with auto_resume=true, "
            "or start over with overwrite_output_dir=true (the old folder is renamed)."
        )


def how_to_resume(config: Config) -> str:
    """What to do after a run was stopped, and what the same command alone would do."""
    again = "; without it, a new run begins and this one is moved aside (overwrite_output_dir is true)"
    more = again if config.run.overwrite_output_dir else ""
    return f"To resume, run the same command with auto_resume=true{more}."


def _clear_newer(folder: Path, search: Search) -> list[str]:
    """Move aside what is of later steps: damaged, or of another attempt, and mistaken for this one's."""
    assert search.checkpoint is not None
    steps = {path: int(path.name.rpartition("-")[2]) for path in named_checkpoints(folder)}
    for path in sorted(folder.glob("eval_results/eval_step_*.json")):
        if (number := path.stem.rpartition("_")[2]).isdecimal():
            steps[path] = int(number)
    for path in (folder / "best_model", folder / "final_model"):
        with contextlib.suppress(Damage):
            steps[path] = read_manifest(path).step
    results = folder / "train_results.json"
    if isinstance(end := (read_mapping(results) or {}).get("steps"), int):
        steps[results] = end
    notes = []
    for newer in [path for path, step in steps.items() if step > search.checkpoint.step]:
        reason = search.damaged.get(newer)
        moved = move_aside(newer, "damaged" if reason else "aside")
        why = f"can't be used, since {reason}" if reason else "is newer than the checkpoint to resume from"
        notes.append(f"{newer.name} {why}: it is now {moved.name}.")
    return notes


def _clear_files(folder: Path) -> list[str]:
    """Move aside what has the name of a file that the run writes, and is none."""
    notes = []
    files = ("training.log", "metrics.jsonl", "config.yaml", "train_results.json", "report.html", "run.json")
    files += ("preflight.json", "status.json")
    folders = ("eval_results", "completions")
    for name in (*files, *(f".{name}.part" for name in files), *folders):
        path = folder / name
        fits = path.is_dir() if name in folders else path.is_file()
        if os.path.lexists(path) and not fits:
            kind = "folder" if name in folders else "file"
            notes.append(f"{path} is not a {kind}: it is now {move_aside(path).name}.")
    return notes


def _is_used(folder: Path) -> bool:
    """Whether there is anything to lose: a run refused at its start leaves only settings and a log."""
    metrics = folder / "metrics.jsonl"
    left = [*folder.glob("checkpoint-*"), *folder.glob("eval_results/*"), *folder.glob("train_results.json")]
    return bool(left) or (metrics.is_file() and metrics.stat().st_size > 0)


def _compare(folder: Path, config: Config, step: int) -> list[str]:
    """What differs between the run as it was begun and as it is asked for now, and what that means."""
    path = folder / "config.yaml"
    if not path.exists():
        return []
    before, now = read_mapping(path), flatten(config)
    if not before:
        moved = move_aside(path, "damaged")
        return [f"config.yaml can't be read and is now {moved.name}: what changed since is not known."]
    decisive = [key for key in now if key not in RESUME_SAFE_KEYS and key in before]
    changed = [key for key in decisive if before[key] != now[key]]
    for key in changed:
        if key in RESUME_FIXED_KEYS:
            raise UserError(
                f"{folder} was begun with {key}: {before[key]}, not {now[key]}: it can't go on with another. "
                "Set it back, or choose another run_name."
            )
    notes = [
        f"{key} is now {now[key]} (the run was begun with {before[key]}): it holds from step {step + 1} on."
        for key in changed
    ]
    length = next((key for key in LENGTH_KEYS if key in before and before[key] != now[key]), None)
    if length and config.update.lr_scheduler_type not in ("constant", "constant_with_warmup"):
        notes.append(
            f"{length} is now {now[length]} (the run was begun with {before[length]}): from step {step + 1} "
            "on the learning rate follows the schedule of the new length."
        )
    return notes


def check_plan(checkpoint: Checkpoint, scalars: Mapping[str, Any], plan: Plan) -> None:
    """Refuse to resume where batches have another composition, or beyond the end of the run."""
    folder, shape, before = checkpoint.folder, plan_shape(plan), scalars.get("plan")
    if not isinstance(before, Mapping) or not {"updater", "source"} <= scalars.keys():
        raise UserError(f"{folder / SCALARS} lacks what a run needs: resume from another checkpoint.")
    new_run = f"or begin a new run from its weights: model_name_or_path={folder} and another run_name."
    if before != shape:
        key = next(key for key in shape if before.get(key) != shape[key])
        raise UserError(
            f"{folder} belongs to a run with {key} = {before.get(key)}, but these settings make it "
            f"{shape[key]}, so that other problems would be repeated or left out: set it back, {new_run}"
        )
    if checkpoint.step > plan.num_steps:
        raise UserError(
            f"{folder} is at step {checkpoint.step}, beyond the {plan.num_steps} that max_steps asks for: "
            f"set max_steps to {checkpoint.step} or more, resume from an earlier checkpoint, {new_run}"
        )


def plan_shape(plan: Plan) -> dict[str, int]:
    """What decides which problems belong to which step."""
    names = ("prompts_per_batch", "num_generations", "minibatches", "num_iterations")
    return {name: getattr(plan, name) for name in names}
