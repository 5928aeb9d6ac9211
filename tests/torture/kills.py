"""Runs that are killed at chosen and at random moments and resumed until they are done, in every variant.

The result has to be bit-equal to the run that nobody killed, with every metric row once. SIGKILL goes to
the process alone (what it started has to notice) or to all of it at once, as an out-of-memory killer or a
cluster does.
"""

import contextlib
import fcntl
import json
import random
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.torture import forks
from tests.torture.compare import differences
from tests.torture.moments import EVENTS, Moment, Watcher
from tests.torture.trial import Outcome, Part, Setting
from tests.torture.variants import VARIANTS, Variant

TRIALS_PER_VARIANT = 7
LONGEST_RUN_S = 240.0
LONGEST_END_S = (
    30.0  # for what a killed process started; a rank that lost another has its heartbeat to wait for
)


@dataclass(kw_only=True)
class Launch:
    """The processes of one start of a run: one for each rank."""

    runs: list[forks.Run]

    def poll(self) -> bool:
        """Whether all have ended."""
        ended = [run.poll() is not None for run in self.runs]  # all are asked
        return all(ended)

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        ended = [run.wait(max(0.0, deadline - time.monotonic())) is not None for run in self.runs]
        return all(ended)

    def kill(self, rng: random.Random) -> str:
        """SIGKILL to one rank or all, alone or with all that it started; says which."""
        group = rng.random() < 0.5
        victims = self.runs if len(self.runs) == 1 or group else [rng.choice(self.runs)]
        for run in victims:
            run.kill(group=group)
        if len(victims) == len(self.runs):
            return "the process and all it started" if group else "the process alone"
        return f"rank {self.runs.index(victims[0])} alone"


def launch(variant: Variant, output: Path, logs: Path) -> Launch:
    """Start the variant's command; with several ranks as a launcher would."""
    argv = variant.argv(output)
    number = len(list(logs.glob("*.log"))) if logs.is_dir() else 0
    if variant.ranks == 1:
        return Launch(runs=[forks.start(argv, log=logs / f"{number:03d}.log")])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    runs = []
    for rank in range(variant.ranks):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(variant.ranks),
            "LOCAL_WORLD_SIZE": str(variant.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WHETSTONE_SHARE_GPU": "1",  # where there is a GPU
        }
        log = logs / f"{number + rank:03d}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        runs.append(forks.start(argv, log=log, environment=environment))
    return Launch(runs=runs)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def uninterrupted(variant: Variant, shared: Path) -> tuple[Path, float]:
    """The folder of the variant's run that nobody kills, and its seconds; made once for all trials."""
    folder = shared / "uninterrupted" / variant.name
    with _locked(folder.with_suffix(".lock")):
        record = folder / "seconds.json"
        if not record.is_file():
            shutil.rmtree(folder, ignore_errors=True)
            began = time.monotonic()
            run = launch(variant, folder, folder / "logs")
            ended = run.wait(LONGEST_RUN_S)
            if not ended or any(one.code for one in run.runs):
                codes = [one.code for one in run.runs]
                for one in run.runs:
                    one.kill(group=True)
                raise RuntimeError(
                    f"the uninterrupted run of {variant.name}: {codes}, {run.runs[0].output[-1500:]}"
                )
            record.write_text(json.dumps(time.monotonic() - began))
        return folder / "run", json.loads(record.read_text())


def names(seed: int) -> list[str]:
    return [f"{variant}/{number}" for number in range(TRIALS_PER_VARIANT) for variant in VARIANTS]


def run(name: str, setting: Setting) -> Outcome:
    variant = VARIANTS[name.rpartition("/")[0]]
    rng = random.Random(f"{setting.seed} {name}")
    whole, seconds = uninterrupted(variant, setting.shared)
    outcome = Outcome(tried=0)
    story = []
    for _ in range(rng.choice([1, 2, 2, 3])):
        events = [
            event for event in EVENTS if "removal" not in event or "save_total_limit" in variant.settings
        ]
        moment = Moment.draw(rng, seconds, events=events)
        killed = _run_until(variant, setting.folder, moment, rng, outcome)
        story.append(
            f"{moment.event} x{moment.repeats} + {moment.delay_s * 1000:.0f} ms: {killed or 'it ended'}"
        )
        if killed is None:
            break
        outcome.tried += 1
        outcome.details[moment.event] = outcome.details.get(moment.event, 0) + 1
    _finish(variant, setting.folder, outcome)
    if not outcome.losses:
        outcome.losses += differences(whole, setting.folder / "run")
    if outcome.losses:
        outcome.losses[0] += f" (kills: {'; '.join(story)})"
    return outcome


def _run_until(
    variant: Variant, folder: Path, moment: Moment, rng: random.Random, outcome: Outcome
) -> str | None:
    """Start or resume the run and kill it at `moment`: who was killed, None where it ended before."""
    watcher = Watcher(folder / "run", moment, variant.max_steps)
    started = launch(variant, folder, folder / "logs")
    deadline = time.monotonic() + LONGEST_RUN_S
    come = False
    while not come and not started.poll() and time.monotonic() < deadline:
        come = watcher.has_come()
        time.sleep(0.0005)
    if come:
        time.sleep(moment.delay_s)
    if started.poll():
        outcome.losses += _complaints(started)
        return None
    if not come:
        outcome.losses.append(f"hangs: {LONGEST_RUN_S:.0f} s without an end")
    killed = started.kill(rng)
    if not started.wait(LONGEST_END_S):
        outcome.losses.append(
            f"{killed} was killed, and another rank is still there after {LONGEST_END_S:.0f} s"
        )
        for one in started.runs:
            one.kill(group=True)
    outcome.losses += [f"left running: {command}" for command in forks.left_behind(LONGEST_END_S)]
    return killed


def _complaints(started: Launch) -> list[str]:
    return [
        f"ended with exit code {one.code}: {one.output[-600:]}"
        for one in started.runs
        if one.code != 0 or "Traceback" in one.output
    ]


def _finish(variant: Variant, folder: Path, outcome: Outcome) -> None:
    """Resume until the run is done, as its user would."""
    started = launch(variant, folder, folder / "logs")
    if not started.wait(LONGEST_RUN_S):
        outcome.losses.append(f"hangs after a resume: {LONGEST_RUN_S:.0f} s without an end")
        for one in started.runs:
            one.kill(group=True)
    else:
        outcome.losses += _complaints(started)
    outcome.losses += [f"left running: {command}" for command in forks.left_behind(LONGEST_END_S)]


PART = Part(
    name="kills",
    unit="SIGKILLs",
    summary="runs killed at chosen and random moments, resumed, bit-equal to the uninterrupted run",
    names=names,
    run=run,
    limit_s=4 * LONGEST_RUN_S,
)
