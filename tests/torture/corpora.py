"""The corpora of tests/corpora as cases for real processes: bad configurations, data files, model folders,
run folders and reward functions. One small adapter for each; a corpus that is not there has no cases.
"""

import importlib
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.torture import bad_rewards, command_lines, forks
from tests.torture.inputs import TINY, Case, run_case
from tests.torture.trial import Outcome, Part, Setting


def make_part(name: str, summary: str, cases: Callable[[], Sequence[Case]]) -> Part:
    """A part whose trials are the cases of a corpus, by number."""

    @lru_cache(maxsize=1)
    def loaded() -> Sequence[Case]:
        return cases()

    def names(seed: int) -> list[str]:
        return [f"{number:04d}" for number in range(len(loaded()))]

    def run(trial: str, setting: Setting) -> Outcome:
        return run_case(loaded()[int(trial)], setting)

    return Part(name=name, unit="inputs", summary=summary, names=names, run=run, limit_s=400)


def _corpus(name: str) -> Any:
    """A module of tests/corpora, or None."""
    try:
        return importlib.import_module(f"tests.corpora.{name}")
    except ModuleNotFoundError as error:
        if error.name in ("tests.corpora", f"tests.corpora.{name}"):
            return None
        raise


def configs() -> list[Case]:
    corpus = _corpus("configs")
    if corpus is None:
        return []

    def adapt(bad: Any) -> Case:
        return Case(
            name=bad.name,
            argv=(),
            prepare=lambda folder: corpus.arguments(bad, folder),
            codes=(bad.exit_code,),
            forbidden=("executed",),
        )

    return [adapt(bad) for bad in corpus.CASES]


def data_files() -> list[Case]:
    """Each case is made in a process of its own: pyarrow starts threads, which a fork would lose."""
    corpus = _corpus("data_files")
    if corpus is None:
        return []

    def write(folder: Path) -> list[dict[str, Any]]:
        return [case._asdict() for case in corpus.write(folder)]

    def made(folder: Path) -> list[dict[str, Any]]:
        return forks.call(lambda: write(folder), folder.parent / "data.log")

    def adapt(number: int, bad: dict[str, Any]) -> Case:
        return Case(
            name=bad["name"],
            argv=(),
            prepare=lambda folder: made(folder)[number]["argv"],
            codes=(bad["code"],),
        )

    with tempfile.TemporaryDirectory() as folder:
        found = forks.call(lambda: write(Path(folder, "data")), Path(folder, "data.log"))
    return [adapt(number, bad) for number, bad in enumerate(found)]


def model_folders() -> list[Case]:
    corpus = _corpus("model_folders")
    if corpus is None:
        return []
    words = [word for word in TINY if not word.startswith("model_name_or_path")]

    def adapt(name: str, code: int) -> Case:
        def prepare(folder: Path) -> None:
            forks.call(lambda: corpus.make(folder / "model", name), folder.parent / "model.log")

        return Case(
            name=name,
            argv=["train", *words, "model_name_or_path=model"],
            prepare=prepare,
            codes=(code,),
            forbidden=(f"model/{corpus.PROOF}",),
        )

    return [adapt(name, model.exit_code) for name, model in corpus.MODELS.items()]


PARTS = (
    make_part(
        "commands",
        "bad command lines and configuration files: one sentence, exit code 2, no hang, nothing lost",
        command_lines.cases,
    ),
    make_part("configs", "bad configurations: one sentence, exit code 2, no hang", configs),
    make_part("data", "bad data files and task settings: one sentence, exit code 2, no hang", data_files),
    make_part("models", "broken model folders: one sentence, no code of theirs executed", model_folders),
    make_part("rewards", "reward functions that raise, hang, fork, exit, return nonsense", bad_rewards.cases),
)
