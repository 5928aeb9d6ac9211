"""The corpora of tests/corpora as cases for real processes: bad configurations, data files, model folders,
run folders and reward functions. One small adapter for each; a corpus that is not there has no cases.
"""

import importlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.torture import bad_rewards, command_lines, forks
from tests.torture.compare import differences
from tests.torture.inputs import TINY, Case, judge, run_case
from tests.torture.kills import LONGEST_RUN_S, uninterrupted
from tests.torture.trial import Outcome, Part, Setting
from tests.torture.variants import Variant

THREE_STEPS = Variant(name="three-steps", settings={"max_steps": 3})


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


def rewards() -> list[Case]:
    """Our own few, and those of the corpus."""
    corpus = _corpus("rewards")
    if corpus is None:
        return bad_rewards.cases()

    def adapt(number: int, name: str, codes: tuple[int, ...]) -> Case:
        def prepare(folder: Path) -> list[str]:
            return corpus.command(list(corpus.write(folder / "rewards"))[number], folder / "out")

        return Case(name=name, argv=(), prepare=prepare, codes=codes, limit_s=200)

    with tempfile.TemporaryDirectory() as folder:
        found = list(corpus.write(Path(folder)))
    return [
        *bad_rewards.cases(),
        *(adapt(number, bad.name, tuple(bad.codes)) for number, bad in enumerate(found)),
    ]


def run_folders() -> dict[str, Any]:
    """The damages of a finished run of three steps, by name."""
    corpus = _corpus("run_folders")
    return {} if corpus is None else corpus.DAMAGES


def _resume_damaged(name: str, setting: Setting) -> Outcome:
    """Damage a run folder and resume it: refused in a sentence, or the weights of the undamaged run."""
    damaged = run_folders()[name.replace("~", "/")]
    whole, _ = uninterrupted(THREE_STEPS, setting.shared)
    folder = setting.folder / "run"
    shutil.copytree(whole, folder)
    forks.call(lambda: damaged.damage(folder), setting.folder / "damage.log")
    outcome = Outcome()
    again = forks.start(THREE_STEPS.argv(setting.folder), log=setting.folder / "again.log")
    code = again.wait(LONGEST_RUN_S)
    if code is None:
        again.kill(group=True)
        return Outcome(losses=[f"{name}: hangs: {again.output[-300:]}"])
    outcome.details = {f"exit code {code}": 1}
    wanted = 0 if damaged.outcome == "resumed" else 2
    outcome.losses += judge(Case(name=name, argv=(), codes=(wanted,)), code, again.output)
    outcome.losses += [
        f"the output does not name {word!r}" for word in damaged.names if word not in again.output
    ]
    outcome.losses += [f"{kept} is gone" for kept in damaged.kept if not list(folder.glob(kept))]
    if code == 0 and damaged.outcome == "resumed":
        # The model card quotes the first evaluation, which may be what is damaged.
        outcome.losses += [
            loss
            for loss in differences(whole, folder)
            if loss.startswith("final_model") and not loss.startswith("final_model/README.md")
        ]
    if list(setting.folder.rglob(_corpus("run_folders").PROOF)):
        outcome.losses.append("something was executed")
    outcome.losses += [f"left running: {command}" for command in forks.left_behind(15)]
    if outcome.losses:
        outcome.losses[0] = f"{name}: {outcome.losses[0]}"
    return outcome


RUN_FOLDERS = Part(
    name="folders",
    unit="inputs",
    summary="damaged run folders: refused in one sentence, or resumed to the same weights; nothing deleted",
    names=lambda seed: [name.replace("/", "~") for name in run_folders()],
    run=_resume_damaged,
    limit_s=3 * LONGEST_RUN_S,
)
PARTS = (
    make_part(
        "commands",
        "bad command lines and configuration files: one sentence, exit code 2, no hang, nothing lost",
        command_lines.cases,
    ),
    make_part("configs", "bad configurations: one sentence, exit code 2, no hang", configs),
    make_part("data", "bad data files and task settings: one sentence, exit code 2, no hang", data_files),
    make_part("models", "broken model folders: one sentence, no code of theirs executed", model_folders),
    make_part("rewards", "reward functions that raise, hang, fork, exit, return nonsense", rewards),
    RUN_FOLDERS,
)
