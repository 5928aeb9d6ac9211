"""A step's problems dealt out to the ranks, and everybody's scored groups brought together again.

`SharedCollector` offers what `rollout.Collector` does, to training and evaluation alike: every rank samples
and scores its share, and all of them end up with all groups in the order of the problems. Of ranks that
decode the same tokens only the first scores. A rank that fails tells the others why. For a process alone
there is nothing to share.
"""

from typing import Any

from whetstone.engines.base import Sampling
from whetstone.errors import UserError
from whetstone.parallel.collectives import gather_objects, my_share
from whetstone.parallel.mesh import Ranks
from whetstone.rollout.collector import Abandoned, Collector
from whetstone.tasks.scoring.process import ScoringRequest
from whetstone.types import Group, Problem, Score


class SharedCollector:
    """The collectors of all ranks as one."""

    def __init__(self, collector: Collector, ranks: Ranks, line: Any = None):
        """`line`: the ranks' second line, where sampling goes on in a thread beside the update."""
        self._collector = collector
        self._ranks = ranks
        self._line = line
        self.waits_for_others = ranks.world_size > 1
        self.engine = collector.engine
        self.custom_metrics: dict[str, float] = {}
        self.prompts_cut = 0  # since these two were last set to 0, on all ranks
        self.scoring_s = 0.0  # of the rank that waited longest

    @property
    def abandoned(self) -> bool:
        return self._collector.abandoned

    @abandoned.setter
    def abandoned(self, value: bool) -> None:
        self._collector.abandoned = value

    def collect(
        self,
        problems: list[Problem],
        *,
        num_samples: int,
        sampling: Sampling,
        seed_parts: tuple[int | str, ...],
    ) -> list[Group]:
        """`num_samples` scored completions of each problem, sampled and scored wherever."""
        one, groups, failure, given_up = self._collector, [], None, False
        one.prompts_cut, one.scoring_s = 0, 0.0
        mine = my_share(self._ranks, problems)
        try:
            if mine:
                groups = one.collect(mine, num_samples=num_samples, sampling=sampling, seed_parts=seed_parts)
        except UserError as error:
            failure = str(error)
        except Abandoned:  # told as well: the others may be waiting for this rank's share
            given_up = True
        counts = (one.prompts_cut, one.scoring_s, dict(one.custom_metrics))
        told = gather_objects(self._ranks, (groups, failure, given_up, *counts), self._line)
        failures = [failure for _, failure, *_ in told if failure is not None]
        if failures:
            raise UserError(failures[0])
        if any(given_up for _, _, given_up, *_ in told):
            raise Abandoned
        self.prompts_cut += sum(cut for *_, cut, _, _ in told)
        self.scoring_s += max(seconds for *_, seconds, _ in told)
        self.custom_metrics = _mean_of([metrics for *_, metrics in told])
        shares = [groups for groups, *_ in told]
        return [shares[i % len(shares)][i // len(shares)] for i in range(len(problems))]


class SilentScorer:
    """For a rank that decodes the same tokens as another, which scores them: its own scores are thrown
    away.
    """

    def __init__(self) -> None:
        self._count = 0
        self.custom_metrics: dict[str, float] = {}

    def submit(self, answer: ScoringRequest) -> None:
        self._count += 1

    def gather(self) -> list[Score]:
        count, self._count = self._count, 0
        return [Score(reward=0.0, parts={"correct": 0.0}, answer=None)] * count

    def __enter__(self) -> "SilentScorer":
        return self

    def __exit__(self, *_: Any) -> None: ...


def _mean_of(rows: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        name: sum(row[name] for row in rows if name in row) / sum(name in row for row in rows)
        for name in names
    }
