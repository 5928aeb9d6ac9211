"""The corpora of tests/corpora as cases for real processes: bad configurations, data files, model folders, run
folders and reward functions. One small adapter for each; a corpus that is not there has no cases.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

from tests.torture import command_lines
from tests.torture.inputs import Case, run_case
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

    return Part(name=name, unit="inputs", summary=summary, names=names, run=run, limit_s=300)


PARTS = (
    make_part(
        "commands",
        "bad command lines and configuration files: one sentence, exit code 2, no hang, nothing lost",
        command_lines.cases,
    ),
)
