"""Bad input as real commands: one sentence, exit code 2, no traceback, no hang, and nothing that was there
is lost.

A `Case` is a command with the files it is given. Corpora of tests/corpora become cases in `corpora.py`.
"""

import hashlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.torture import forks
from tests.torture.trial import Outcome, Setting

LONGEST_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """`prepare` makes in a folder what `files` can't say and may return words to add to the command."""

    name: str
    argv: Sequence[str]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    prepare: Callable[[Path], Sequence[str] | None] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    inside: Callable[[], None] | None = None  # called in the process before the command
    codes: tuple[int, ...] = (2,)
    forbidden: tuple[str, ...] = ()  # what must not be there afterwards: a trace of code that was executed
    limit_s: float = LONGEST_S


# A run of a few seconds, to which a case adds what is wrong.
TINY = (
    "model_name_or_path=pebble",
    "datasets={chain_sum: {config: {max_terms: 2, max_digits: 1}}}",
    "reward_funcs=[accuracy]",
    "prompts_per_step=1",
    "num_generations=2",
    "max_completion_length=4",
    "max_steps=1",
    "eval_num_samples=0",
    "reward_workers=1",
    "output_dir=out",
    "run_name=run",
    "preflight=off",
)


def run_case(case: Case, setting: Setting) -> Outcome:
    folder = setting.folder / "here"
    folder.mkdir()
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    more = case.prepare(folder) if case.prepare is not None else None
    before = fingerprints(folder)
    run = forks.start(
        [*case.argv, *(more or ())],
        log=setting.folder / "command.log",
        folder=folder,
        environment=case.environment,
        prepare=case.inside,
    )
    code = run.wait(case.limit_s)
    outcome = Outcome()
    if code is None:
        run.kill(group=True)
        outcome.losses.append(f"hangs: no end in {case.limit_s:.0f} s; it said: {run.output[-300:]}")
    else:
        outcome.losses += judge(case, code, run.output)
    outcome.losses += [f"left running: {command}" for command in forks.left_behind(15)]
    after = fingerprints(folder)
    lost = [name for name in before if after.get(name) != before[name]]
    outcome.losses += [f"{name} was there and is lost or changed" for name in lost]
    traces = [name for name in case.forbidden if (folder / name).exists()]
    outcome.losses += [f"{name} is there: something was executed" for name in traces]
    outcome.details = {f"exit code {code}": 1}
    if outcome.losses:
        outcome.losses[0] = f"{case.name}: {outcome.losses[0]}"
    return outcome


def judge(case: Case, code: int, output: str) -> list[str]:
    """What is wrong with how a command ended."""
    losses = []
    if code not in case.codes:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        losses.append(f"{how} instead of {case.codes}; it said: {output[-400:]}")
    if "Traceback (most recent call last)" in output:
        losses.append(f"a traceback: {output[-400:]}")
    sentences = [line for line in output.splitlines() if line.startswith("whet: ")]
    if code == 2 and len(sentences) != 1:
        losses.append(f"{len(sentences)} sentences instead of one: {output[-400:]}")
    return losses


def fingerprints(folder: Path) -> dict[str, str]:
    """What every file that was given holds; a command may add files, not change these."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = f"link to {os.readlink(path)}"
        elif path.is_file() and path.stat().st_size < 1 << 28:
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
