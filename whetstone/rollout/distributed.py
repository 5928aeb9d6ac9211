"""Collect rollouts on all ranks: shard the problems, sample and score locally, all-gather the groups.

Every rank gets all groups in the order of the problems. Of tensor-parallel ranks, which decode the same
tokens, only the first scores. A UserError on one rank is raised on all of them.
"""

from typing import Any

from whetstone.errors import UserError
from whetstone.parallel.collectives import all_gather_data_objects, shard_list
from whetstone.parallel.mesh import Ranks
from whetstone.rollout.collector import Collector, RolloutCancelled
from whetstone.types import Group, Problem


class DistributedCollector(Collector):
    def __init__(self, *args: Any, ranks: Ranks, side_group: Any, **kwargs: Any):
        """`side_group`: a second process group, for a thread that samples during the update."""
        super().__init__(*args, **kwargs)
        self._ranks, self._side_group = ranks, side_group
        self.is_collective = ranks.world_size > 1

    def collect(self, problems: list[Problem], **options: Any) -> list[Group]:
        """`Collector.collect` on all ranks; counts truncated prompts of all, and the longest `scoring_s`."""
        num_truncated, scoring_s = self.num_truncated_prompts, self.scoring_s
        self.num_truncated_prompts, self.scoring_s = 0, 0.0
        groups, failure, cancelled = [], None, False
        shard = shard_list(self._ranks, problems)
        try:
            groups = super().collect(shard, **options) if shard else []
        except UserError as error:
            failure = str(error)
        except RolloutCancelled:  # reported too: other ranks may wait for this rank's groups
            cancelled = True
        counts = (self.num_truncated_prompts, self.scoring_s, dict(self.scorer.custom_metrics))
        reports = all_gather_data_objects(
            self._ranks, (groups, failure, cancelled, *counts), self._side_group
        )
        failures = [failure for _, failure, *_ in reports if failure is not None]
        if failures:
            raise UserError(failures[0])
        if any(cancelled for _, _, cancelled, *_ in reports):
            raise RolloutCancelled
        self.num_truncated_prompts = num_truncated + sum(truncated for *_, truncated, _, _ in reports)
        self.scoring_s = scoring_s + max(seconds for *_, seconds, _ in reports)
        self.custom_metrics = _mean_of([metrics for *_, metrics in reports])
        shards = [groups for groups, *_ in reports]
        return [shards[i % len(shards)][i // len(shards)] for i in range(len(problems))]


def _mean_of(rows: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: sum(values) / len(values) for name, values in columns.items()}
