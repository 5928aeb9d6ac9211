"""Plans a campaign, runs its trials a few at a time, each in a forked process, and keeps count on the disk.

The state is a file of one JSON line a trial: a campaign that was stopped goes on with `--resume`. Trials of
all parts are interleaved, so that a short slice has a share of each. What a lost trial left behind is kept.
"""

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.torture import forks
from tests.torture.trial import Outcome, Part, Setting

PACKAGE = Path(__file__).resolve().parents[2] / "whetstone"


@dataclass(kw_only=True)
class Running:
    part: Part
    name: str
    process: forks.Run
    folder: Path


def package_version() -> str:
    """A fingerprint of the package's code: results of another version do not count."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def interleave(
    parts: Sequence[Part], seed: int, first: int | None = None, match: str = ""
) -> list[tuple[Part, str]]:
    """All trials (or the first few of each part) with `match` in their name; any beginning has a share of
    every part.
    """
    placed = []
    for number, part in enumerate(parts):
        trials = [name for name in part.names(seed) if match in name][:first]
        placed += [((place + 0.5) / len(trials), number, name) for place, name in enumerate(trials)]
    return [(parts[number], name) for _, number, name in sorted(placed)]


class Campaign:
    def __init__(
        self,
        folder: Path,
        parts: Sequence[Part],
        seed: int,
        *,
        jobs: int,
        resume: bool = False,
        first: int | None = None,
        match: str = "",
    ) -> None:
        self.folder, self.parts, self.seed, self._jobs = folder, parts, seed, jobs
        self._state = folder / "state.jsonl"
        self.header = {"seed": seed, "version": package_version()}
        self.records: list[dict[str, Any]] = []
        self.seconds_before = 0.0
        if resume and self._state.is_file():
            self._read()
        else:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self._append(self.header)
        self.plan = interleave(parts, seed, first, match)
        self._began = time.monotonic()

    def _read(self) -> None:
        lines = []
        for line in self._state.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a campaign may be killed as well
                lines.append(json.loads(line))
        if not lines or lines[0] != self.header:
            sys.exit(
                f"{self._state} is of another seed or another version of the package: leave out --resume to "
                "begin anew."
            )
        self.records = [line for line in lines[1:] if "trial" in line]
        self.seconds_before = sum(line["campaign_s"] for line in lines[1:] if "campaign_s" in line)

    def _append(self, record: dict[str, Any]) -> None:
        with self._state.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self._began

    def run(self, minutes: float | None) -> None:
        """Run what is planned and not done, until the end or for so many minutes."""
        done = {record["trial"] for record in self.records}
        waiting = [(part, name) for part, name in self.plan if f"{part.name}/{name}" not in done]
        deadline = time.monotonic() + (minutes * 60 if minutes else float("inf"))
        running: list[Running] = []
        try:
            while running or (waiting and time.monotonic() < deadline):
                while waiting and len(running) < self._jobs and time.monotonic() < deadline:
                    running.append(self._start(*waiting.pop(0)))
                for one in [*running]:
                    if self._has_ended(one):
                        running.remove(one)
                        self._record(one)
                        self._show(len(waiting) + len(running))
                time.sleep(0.01)
        finally:
            for one in running:
                forks.end_all(forks.descendants(one.process.pid) | {one.process.pid})
            self._append({"campaign_s": time.monotonic() - self._began})
            print(flush=True)

    def _start(self, part: Part, name: str) -> Running:
        folder = self.folder / "trials" / f"{part.name}-{name.replace('/', '-')}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        setting = Setting(folder=folder / "work", shared=self.folder / "shared", seed=self.seed)
        setting.folder.mkdir()

        def work() -> int:
            forks.adopt_orphans()
            outcome = part.run(name, setting)
            result = folder / "outcome.part"
            result.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
            result.replace(folder / "outcome.json")
            return 0

        process = forks.fork(work, log=folder / "trial.log", argv=["torture", f"{part.name}/{name}"])
        return Running(part=part, name=name, process=process, folder=folder)

    def _has_ended(self, one: Running) -> bool:
        if one.process.poll() is not None:
            return True
        if time.monotonic() - one.process.began < one.part.limit_s:
            return False
        forks.end_all(forks.descendants(one.process.pid) | {one.process.pid})
        one.process.wait(10)
        return True

    def _record(self, one: Running) -> None:
        path = one.folder / "outcome.json"
        if path.is_file():
            outcome = json.loads(path.read_text(encoding="utf-8"))
        else:
            seconds = time.monotonic() - one.process.began
            reason = f"the trial gave no result in {seconds:.0f} s (exit code {one.process.code}): "
            outcome = asdict(Outcome(losses=[reason + one.process.output[-800:]]))
        trial = f"{one.part.name}/{one.name}"
        record = {
            "trial": trial,
            "part": one.part.name,
            "seconds": round(time.monotonic() - one.process.began, 2),
            **outcome,
        }
        if outcome["losses"]:
            record["reproduce"] = reproduction(trial, self.seed)
            print(f"\nLOST {trial}: {outcome['losses'][0][:600]}\n  {record['reproduce']}", flush=True)
        else:
            shutil.rmtree(one.folder, ignore_errors=True)
        self.records.append(record)
        self._append(record)

    def _show(self, waiting: int) -> None:
        counts = []
        for part in self.parts:
            mine = [record for record in self.records if record["part"] == part.name]
            if mine:
                lost = sum(bool(record["losses"]) for record in mine)
                counts.append(
                    f"{part.name} {sum(record['tried'] for record in mine)}"
                    + (f" ({lost} lost)" if lost else "")
                )
        minutes = self.seconds / 60
        line = f"{minutes:5.1f} min, {len(self.records)} of {len(self.plan)} trials: {', '.join(counts)}"
        end = "\r" if sys.stdout.isatty() else "\n"
        if end == "\r" or len(self.records) % 10 == 0 or not waiting:
            print(
                line[: shutil.get_terminal_size().columns - 1] if end == "\r" else line, end=end, flush=True
            )


def reproduction(trial: str, seed: int) -> str:
    return f"python -m tests.torture --seed {seed} --trial {shlex.quote(trial)}"


def run_one(part: Part, name: str, seed: int, folder: Path) -> Outcome:
    """One trial in this process, for a person who looks into a loss: its folder stays."""
    place = folder / "one" / f"{part.name}-{name.replace('/', '-')}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    forks.adopt_orphans()
    print(f"{part.name}/{name} in {place}, process {os.getpid()}", flush=True)
    return part.run(name, Setting(folder=place, shared=folder / "one" / "shared", seed=seed))
