"""Collect rollouts on all ranks: shard the problems, sample and score locally, all-gather the groups.

`DistributedCollector` has the interface of `Collector`. Every rank gets all groups in the order of the
problems. Of tensor-parallel ranks, which decode the same tokens, only the first scores. A UserError on one
rank is raised on all of them.
"""

from typing import Any

from whetstone.engines.base import SamplingParams
from whetstone.errors import UserError
from whetstone.parallel.collectives import all_gather_data_objects, shard_list
from whetstone.parallel.mesh import Ranks
from whetstone.rollout.collector import Collector, RolloutCancelled
from whetstone.tasks.scoring.process import ScoringRequest
from whetstone.types import Group, Problem, Score


class DistributedCollector:
    """The collectors of all ranks as one."""

    def __init__(self, collector: Collector, ranks: Ranks, side_group: Any = None):
        """`side_group`: a second process group, for a thread that samples during the update."""
        self._collector = collector
        self._ranks = ranks
        self._side_group = side_group
        self.is_collective = ranks.world_size > 1
        self.engine = collector.engine
        self.custom_metrics: dict[str, float] = {}
        self.num_truncated_prompts = 0  # on all ranks, since the caller last reset these two
        self.scoring_s = 0.0  # of the rank that waited longest

    @property
    def cancelled(self) -> bool:
        return self._collector.cancelled

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        self._collector.cancelled = value

    def collect(
        self,
        problems: list[Problem],
        *,
        num_samples: int,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
    ) -> list[Group]:
        """`num_samples` scored completions per problem, from all ranks."""
        local, groups, failure, cancelled = self._collector, [], None, False
        local.num_truncated_prompts, local.scoring_s = 0, 0.0
        shard = shard_list(self._ranks, problems)
        try:
            if shard:
                groups = local.collect(
                    shard, num_samples=num_samples, sampling=sampling, seed_parts=seed_parts
                )
        except UserError as error:
            failure = str(error)
        except RolloutCancelled:  # reported too: other ranks may wait for this rank's groups
            cancelled = True
        counts = (local.num_truncated_prompts, local.scoring_s, dict(local.custom_metrics))
        reports = all_gather_data_objects(
            self._ranks, (groups, failure, cancelled, *counts), self._side_group
        )
        failures = [failure for _, failure, *_ in reports if failure is not None]
        if failures:
            raise UserError(failures[0])
        if any(cancelled for _, _, cancelled, *_ in reports):
            raise RolloutCancelled
        self.num_truncated_prompts += sum(truncated for *_, truncated, _, _ in reports)
        self.scoring_s += max(seconds for *_, seconds, _ in reports)
        self.custom_metrics = _mean_of([metrics for *_, metrics in reports])
        shards = [groups for groups, *_ in reports]
        return [shards[i % len(shards)][i // len(shards)] for i in range(len(problems))]


class NullScorer:
    """Scores nothing: for tensor-parallel ranks whose first rank scores the same tokens."""

    def __init__(self) -> None:
        self._count = 0
        self.custom_metrics: dict[str, float] = {}

    def submit(self, answer: ScoringRequest) -> None:
        self._count += 1

    def gather(self) -> list[Score]:
        count, self._count = self._count, 0
        return [Score(reward=0.0, parts={"correct": 0.0}, answer=None)] * count

    def __enter__(self) -> "NullScorer":
        return self

    def __exit__(self, *_: Any) -> None: ...


def _mean_of(rows: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        name: sum(row[name] for row in rows if name in row) / sum(name in row for row in rows)
        for name in names
    }
