"""Long runs that must not grow: memory, descriptors, threads and processes over 500 steps.

Seen from outside, in /proc, once a step: what the last fifth of a run uses is compared with what the second
fifth used, when everything has been loaded and every cache has been filled once.
"""

import contextlib
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from tests.torture import forks
from tests.torture.trial import Outcome, Part, Setting
from tests.torture.variants import BASE, SUMS

STEPS = 500
MOST_GROWTH_MB = 24.0  # over 300 steps: 80 KB a step; one forgotten batch of any size is more
LONGEST_S = 1500.0
QUICK = {
    **BASE,
    "datasets": SUMS,
    "prompts_per_step": 1,
    "num_generations": 2,
    "max_completion_length": 6,
    "max_steps": STEPS,
    "fixed_eval_steps": 50,
    "eval_num_samples": 2,
    "log_completions_steps": 50,
    "save_steps": 25,
    "save_total_limit": 2,
    "auto_resume": False,
}
RUNS: dict[str, dict[str, object]] = {
    "train": {},
    "async-lora": {"async_rollouts": 1, "use_peft": True, "lora_r": 2},
    "programs": {"datasets": "{code: {config: {path: problems, language: python}}}", "save_steps": 250},
}


@dataclass(frozen=True, kw_only=True)
class Use:
    """What a run and all that it started use at a moment."""

    memory_mb: float  # of the process that trains
    scorers_mb: float  # of the rest together
    descriptors: int
    threads: int
    processes: int


def measure(pid: int) -> Use | None:
    """None where it has ended meanwhile."""
    others = forks.descendants(pid)
    with contextlib.suppress(OSError, ValueError, IndexError):
        return Use(
            memory_mb=_memory_mb(pid),
            scorers_mb=sum(_memory_mb(other) for other in others),
            descriptors=sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
            threads=sum(1 for _ in Path(f"/proc/{pid}/task").iterdir()),
            processes=len(others),
        )
    return None


def _memory_mb(pid: int) -> float:
    """Resident memory that no file stands behind. A page that a fork shared counts before and after it is
    written to, so that copying does not look like growth.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


def run(name: str, setting: Setting) -> Outcome:
    settings = {**QUICK, **RUNS[name], "output_dir": setting.folder, "run_name": "run"}
    begun = forks.start(
        ["train", *(f"{key}={value}" for key, value in settings.items())], log=setting.folder / "run.log"
    )
    rows = setting.folder / "run" / "metrics.jsonl"
    uses: dict[int, Use] = {}
    deadline = time.monotonic() + LONGEST_S
    while begun.poll() is None and time.monotonic() < deadline:
        step = rows.read_bytes().count(b'"kind": "train"') if rows.is_file() else 0
        if step and step not in uses and (use := measure(begun.pid)) is not None:
            uses[step] = use
        time.sleep(0.05)
    outcome = Outcome(tried=max(uses, default=0))
    if begun.code != 0:
        begun.kill(group=True)
        outcome.losses.append(f"ended with {begun.code} after {outcome.tried} steps: {begun.output[-400:]}")
        return outcome
    (setting.folder / "uses.json").write_text(json.dumps({step: vars(use) for step, use in uses.items()}))
    outcome.losses += grown(uses)
    outcome.losses += [f"left running: {command}" for command in forks.left_behind(15)]
    early, late = _windows(uses)
    outcome.details = {
        f"{name}: MB at step {STEPS // 5}": round(statistics.median(use.memory_mb for use in early)),
        f"{name}: MB at step {STEPS}": round(statistics.median(use.memory_mb for use in late)),
    }
    return outcome


def _windows(uses: dict[int, Use]) -> tuple[list[Use], list[Use]]:
    last = max(uses)
    early = [use for step, use in uses.items() if 0.2 * last < step <= 0.4 * last]
    return early, [use for step, use in uses.items() if step > 0.8 * last]


def grown(uses: dict[int, Use]) -> list[str]:
    """What grew between the second and the last fifth of a run. Medians: single steps write checkpoints."""
    early, late = _windows(uses)
    found = []
    for name, most in (
        ("memory_mb", MOST_GROWTH_MB),
        ("scorers_mb", MOST_GROWTH_MB),
        ("descriptors", 0.0),
        ("threads", 0.0),
        ("processes", 0.0),
    ):
        before, after = (statistics.median(getattr(use, name) for use in some) for some in (early, late))
        if after - before > most:
            found.append(f"{name} grew from {before:g} to {after:g} over {len(uses)} measured steps")
    return found


PART = Part(
    name="leaks",
    unit="steps",
    summary=f"runs of {STEPS} steps: memory, descriptors, threads and processes must not grow",
    names=lambda seed: list(RUNS),
    run=run,
    limit_s=LONGEST_S + 60,
)
