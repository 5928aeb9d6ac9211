"""Faults of the disk: full, out of file names, read-only, a limit on file sizes, damaged files.

A run that meets one ends in one sentence with exit code 2 and goes on when there is room again, to the same
weights. A damaged file is refused in a sentence, or the run goes on from what is whole, to the same
weights: never to others. Mounts are made in a namespace of the trial's own and need root; without it those
trials are skipped.
"""

import contextlib
import ctypes
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.torture import forks
from tests.torture.compare import differences
from tests.torture.inputs import Case, judge
from tests.torture.kills import LONGEST_RUN_S, uninterrupted
from tests.torture.moments import EVENTS, Moment, Watcher
from tests.torture.trial import Outcome, Part, Setting
from tests.torture.variants import VARIANTS, Variant

SIZES_MB = (1, 6, 11, 16, 22, 31, 42, 60, 90)
FILE_NAMES = (12, 24, 40)
LIMITS_KB = (1, 40, 2_000, 9_000, 12_000)
NUM_DAMAGES = 60
NUM_FILLED = 12
RUN = VARIANTS["grpo"]
CLONE_NEWNS, MS_REC_PRIVATE, MS_RDONLY, MS_REMOUNT = 0x00020000, 0x44000, 1, 32


def names(seed: int) -> list[str]:
    trials = [
        *(f"full/{size}" for size in SIZES_MB),
        *(f"names/{count}" for count in FILE_NAMES),
        *(f"limit/{size}" for size in LIMITS_KB),
        *(f"readonly/{number}" for number in range(2)),
        *(f"fills/{number}" for number in range(NUM_FILLED)),
        *(f"damage/{number}" for number in range(NUM_DAMAGES)),
    ]
    random.Random(f"{seed} disk").shuffle(trials)  # so that a slice has some of each
    return trials


def run(name: str, setting: Setting) -> Outcome:
    kind, _, value = name.partition("/")
    trials: dict[str, Callable[[int, Setting], Outcome]] = {
        "full": lambda size, given: _on_small_disk(given, f"size={size}m", "size=1g"),
        "names": lambda count, given: _on_small_disk(given, f"nr_inodes={count}", "nr_inodes=100000"),
        "limit": _under_limit,
        "readonly": _read_only,
        "fills": _fills_up,
        "damage": _damaged,
    }
    return trials[kind](int(value), setting)


# ---- a disk that ends --------------------------------------------------------------------------------------


def _mount(target: Path, options: str, flags: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"torture", os.fsencode(target), b"tmpfs", flags, options.encode()):
        raise OSError(ctypes.get_errno(), "mount")


def _own_mounts() -> str:
    """Why this process can't mount; empty: it can, and nobody else sees it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(None, b"/", None, MS_REC_PRIVATE, None):
        return f"mounting a small disk needs root ({os.strerror(ctypes.get_errno())})"
    return ""


def _on_small_disk(setting: Setting, small: str, large: str) -> Outcome:
    whole, _ = uninterrupted(RUN, setting.shared)
    reason = _own_mounts()
    if reason:
        return Outcome(tried=0, skipped=reason)
    disk = setting.folder / "disk"
    disk.mkdir()
    _mount(disk, small)
    outcome = Outcome()
    first = forks.start(RUN.argv(disk), log=setting.folder / "first.log")
    code = _ended(first, outcome)
    outcome.details = {f"exit code {code}": 1}
    if code is not None:
        outcome.losses += judge(Case(name="", argv=(), codes=(0, 2)), code, first.output)
    _mount(disk, large, MS_REMOUNT)
    _resume(setting, disk, whole, outcome)
    return outcome


def _ended(run: forks.Run, outcome: Outcome) -> int | None:
    code = run.wait(LONGEST_RUN_S)
    if code is None:
        run.kill(group=True)
        outcome.losses.append(f"hangs: no end in {LONGEST_RUN_S:.0f} s: {run.output[-300:]}")
    outcome.losses += [f"left running: {command}" for command in forks.left_behind(15)]
    return code


def _resume(setting: Setting, output: Path, whole: Path, outcome: Outcome, variant: Variant = RUN) -> None:
    """Go on with the same command; what comes out must be what comes out of an undisturbed run."""
    again = forks.start(variant.argv(output), log=setting.folder / "again.log")
    code = _ended(again, outcome)
    if code == 0:
        outcome.losses += differences(whole, output / "run")
    elif code is not None:
        outcome.losses.append(f"can't go on when there is room again: {code}, {again.output[-400:]}")


def _under_limit(size_kb: int, setting: Setting) -> Outcome:
    whole, _ = uninterrupted(RUN, setting.shared)
    outcome = Outcome()

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_kb << 10, size_kb << 10))

    first = forks.start(RUN.argv(setting.folder), log=setting.folder / "first.log", prepare=limit)
    code = _ended(first, outcome)
    outcome.details = {f"exit code {code}": 1}
    if code is not None:
        # The limit holds for the output of the command as well: with little room the sentence may be cut.
        losses = judge(Case(name="", argv=(), codes=(0, 2)), code, first.output)
        outcome.losses += losses
    _resume(setting, setting.folder, whole, outcome)
    return outcome


def _fills_up(number: int, setting: Setting) -> Outcome:
    """Somebody else's file takes all the room at a random moment."""
    whole, seconds = uninterrupted(RUN, setting.shared)
    reason = _own_mounts()
    if reason:
        return Outcome(tried=0, skipped=reason)
    disk = setting.folder / "disk"
    disk.mkdir()
    _mount(disk, "size=1g")
    outcome = Outcome()
    rng = random.Random(f"{setting.seed} fills {number}")
    events = [event for event in EVENTS if "removal" not in event and event != "report written"]
    moment = Moment.draw(rng, seconds, events=events)
    watcher = Watcher(disk / "run", moment, RUN.max_steps)
    first = forks.start(RUN.argv(disk), log=setting.folder / "first.log")
    while first.poll() is None and not watcher.has_come():
        first.wait(0.0005)
    first.wait(moment.delay_s)
    filler = disk / "filler"
    with filler.open("wb") as file, contextlib.suppress(OSError):
        room = os.statvfs(disk)
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_bsize)
    code = _ended(first, outcome)
    outcome.details = {f"exit code {code}": 1}
    if code is not None:
        losses = judge(Case(name="", argv=(), codes=(0, 2)), code, first.output)
        outcome.losses += [f"full at '{moment.event}': {loss}" for loss in losses]
    filler.unlink()
    _resume(setting, disk, whole, outcome)
    return outcome


def _read_only(number: int, setting: Setting) -> Outcome:
    """Read-only from the start: of a new run (0), or of one that was killed before (1)."""
    whole, _ = uninterrupted(RUN, setting.shared)
    reason = _own_mounts()
    if reason:
        return Outcome(tried=0, skipped=reason)
    disk = setting.folder / "disk"
    disk.mkdir()
    _mount(disk, "size=1g")
    outcome = Outcome()
    if number:
        _half(whole, disk / "run")
    _mount(disk, "size=1g", MS_REMOUNT | MS_RDONLY)
    first = forks.start(RUN.argv(disk), log=setting.folder / "first.log")
    code = _ended(first, outcome)
    outcome.details = {f"exit code {code}": 1}
    if code is not None:
        outcome.losses += judge(Case(name="", argv=()), code, first.output)
    _mount(disk, "size=1g", MS_REMOUNT)
    _resume(setting, disk, whole, outcome)
    return outcome


# ---- damaged files -----------------------------------------------------------------------------------------


def _half(whole: Path, folder: Path) -> None:
    """A run as a kill after its second checkpoint leaves it."""
    shutil.copytree(whole, folder)
    for lost in ("final_model", "checkpoint-3", "checkpoint-4"):
        shutil.rmtree(folder / lost)
    for lost in ("train_results.json", "report.html", f"eval_results/eval_step_{RUN.max_steps}.json"):
        (folder / lost).unlink()


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size or 1))


def _garble(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(path.stat().st_size))


def _empty(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"")


def _remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def _into_folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _into_link(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _from_other(path: Path, rng: random.Random) -> None:
    """The same file of the checkpoint before, as a mistaken copy would leave it."""
    other = Path(str(path).replace("checkpoint-2", "checkpoint-1"))
    shutil.copy(other, path) if other.is_file() and other != path else _flip(path, rng)


DAMAGES = (_flip, _flip, _cut, _garble, _empty, _remove, _into_folder, _into_link, _from_other)


def _damaged(number: int, setting: Setting) -> Outcome:
    """A run that was killed after its second checkpoint, one file of which is damaged."""
    whole, _ = uninterrupted(RUN, setting.shared)
    rng = random.Random(f"{setting.seed} damage {number}")
    folder = setting.folder / "run"
    _half(whole, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    in_checkpoint = [path for path in files if "checkpoint-2/" in str(path)]
    path = rng.choice(in_checkpoint if rng.random() < 0.7 else files)
    damage = rng.choice(DAMAGES)
    damage(path, rng)
    what = f"{damage.__name__[1:]} {path.relative_to(folder)}"
    outcome = Outcome()
    again = forks.start(RUN.argv(setting.folder), log=setting.folder / "again.log")
    code = _ended(again, outcome)
    outcome.details = {f"exit code {code}": 1}
    if code == 0:
        found = differences(whole, folder, damaged=True)
        # An older checkpoint that nobody reads stays as it is.
        found = [one for one in found if not one.startswith(str(path.relative_to(folder)))]
        if "checkpoint-" not in what:  # what was damaged itself can be lost, the weights can't
            found = [one for one in found if "bit-equal" in one or "final_model" in one]
        outcome.losses += found
    elif code is not None:
        outcome.losses += judge(Case(name="", argv=()), code, again.output)
    if outcome.losses:
        outcome.losses[0] = f"{what}: {outcome.losses[0]}"
    return outcome


PART = Part(
    name="disk",
    unit="faults",
    summary="full and read-only disks, limits, damaged files: one sentence, then the same weights",
    names=names,
    run=run,
    limit_s=3 * LONGEST_RUN_S,
)
