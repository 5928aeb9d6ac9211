"""The folder of a run: opened for a new run, or found again for one that goes on. Nothing in it is ever
overwritten silently.

Knows files and configuration; no model, no metrics.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from whetstone import checkpoint
from whetstone.checkpoint import Checkpoint
from whetstone.config import Config, dump, flatten
from whetstone.config.engines import EnginesRoom
from whetstone.config.measure import MeasureRoom
from whetstone.config.parallel import ParallelRoom
from whetstone.errors import UserError
from whetstone.metrics import write_aside

# A resumed run must have the same of these, or its checkpoint does not fit its model.
FIXED = ("trainer", "model_name_or_path", "use_peft", "lora_r", "lora_alpha", "lora_target_modules")
# These steer a run without changing what it computes.
HARMLESS = frozenset(
    [
        "output_dir",
        "run_name",
        "report_to",
        "wandb_project",
        "wandb_name",
        "wandb_entity",
        "wandb_tags",
        "logging_steps",
        "logging_first_step",
        "log_reward_variance",
        "verbose_variance_logging",
        "log_completions_steps",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "auto_resume",
        "resume_from_checkpoint",
        "overwrite_output_dir",
        "eval_num_examples_to_print",
        "eval_only",
        "checkpoint_path",
        "max_steps",
        "num_train_epochs",
        "fixed_eval_steps",
        "micro_batch_tokens",
        "max_slots",
        "reward_workers",
        "gradient_checkpointing",
        *EnginesRoom.model_fields,
        *ParallelRoom.model_fields,
        *MeasureRoom.model_fields,
    ]
)


def path_of(config: Config) -> Path:
    return Path(config.run.output_dir) / (config.run.run_name or "")


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Where a rank that is not the first writes what it needn't: thrown away in the end."""
    with tempfile.TemporaryDirectory(prefix="whetstone-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def open_run(config: Config, *, is_restart: bool = False) -> tuple[Path, Checkpoint | None, list[str]]:
    """The run's folder, the checkpoint to go on from (None: begin), and what the user should know.

    `is_restart`: a launcher starts it anew after a failure, so it goes on whatever was asked for at first.
    """
    folder = path_of(config)
    found = checkpoint.find(folder, resume_from=None, auto_resume=is_restart)
    if found is None:
        found = checkpoint.find(
            folder, resume_from=config.run.resume_from_checkpoint, auto_resume=config.run.auto_resume
        )
    notes = []
    if found is None and _is_used(folder):
        if not is_restart:
            refuse_taken(config)
        notes.append(f"The earlier run was moved to {_move_aside(folder)}.")
    if found is not None:
        notes.append(f"Going on from {found.folder} (step {found.step}).")
        notes += _compare(folder, config)
    _make(folder)
    write_aside(folder / "config.yaml", dump(config))
    return folder, found, notes


def refuse_taken(config: Config) -> None:
    """A folder that holds another run is neither gone on with nor moved aside unless that was asked for."""
    run, folder = config.run, path_of(config)
    found = checkpoint.find(folder, resume_from=run.resume_from_checkpoint, auto_resume=run.auto_resume)
    if found is None and _is_used(folder) and not (run.overwrite_output_dir or run.auto_resume):
        raise UserError(
            f"{folder} holds another run: choose another run_name, go on with it by auto_resume=true, "
            "or begin anew with overwrite_output_dir=true (the old one is moved aside)."
        )


def _is_used(folder: Path) -> bool:
    """Whether there is anything to lose: a run refused at its start leaves only settings and a log."""
    metrics = folder / "metrics.jsonl"
    left = [*folder.glob("checkpoint-*"), *folder.glob("eval_results/*"), *folder.glob("train_results.json")]
    return bool(left) or (metrics.is_file() and metrics.stat().st_size > 0)


def _move_aside(folder: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(folder.stat().st_mtime))
    aside = folder.with_name(f"{folder.name}.{stamp}")
    number = 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}.{stamp}-{number}")
    folder.rename(aside)
    return aside


def _compare(folder: Path, config: Config) -> list[str]:
    """What differs between the run as it was begun and as it is asked for now."""
    path = folder / "config.yaml"
    if not path.is_file():
        return []
    before, now = yaml.safe_load(path.read_text(encoding="utf-8")), flatten(config)
    changed = [key for key in now if key not in HARMLESS and key in before and before[key] != now[key]]
    for key in changed:
        if key in FIXED:
            raise UserError(
                f"{folder} was begun with {key}: {before[key]}, not {now[key]}: it can't go on with another. "
                "Set it back, or choose another run_name."
            )
    return [f"{key} is now {now[key]} (the run was begun with {before[key]})." for key in changed]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"The run folder {folder} can't be made ({error.strerror}): set output_dir to a place you may "
            "write to."
        ) from None
