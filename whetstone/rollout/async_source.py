"""One batch ahead: the next batch is sampled and scored in a thread while the update learns from this one.

`Ahead` stands in for `rollout.Groups` where `async_rollouts` is 1. Order: wait for batch t, which weights
t - 1 sampled; hand weights t to the engine, now idle; start batch t + 1; return batch t to be learnt from.
The batch under way is part of a checkpoint, so a resumed run goes on with the very same samples. Decides
nothing about what is sampled, and knows no loss: old samples are weighed by `importance_correction`.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from whetstone.config import Config, Plan
from whetstone.rollout.collector import Collects, Groups, Round
from whetstone.tasks.mixture import Mixture
from whetstone.types import Completion, Finish, Group, Rollout, Score

CLOSING_S = 10.0  # for other ranks to give up as well


class Ahead(Groups):
    def __init__(self, collector: Collects, tasks: Mixture, config: Config, plan: Plan):
        super().__init__(collector, tasks, config, plan)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout")
        self._coming: Future[Round] | None = None  # the batch after the one that was returned last

    def of(self, step: int) -> Round:
        """The round of this batch; the next one is under way when this returns. Raises what went wrong in
        the thread.
        """
        made = super().of(step) if self._coming is None else self._dated(self._coming.result(), step)
        self._coming = None
        sync_s = made.sync_s + self.settle(step)
        following = step + self._plan.updates_per_batch
        if following < self._plan.num_steps:
            self._coming = self._thread.submit(self.sample, following)
        return replace(made, sync_s=sync_s)

    def settle(self, step: int) -> float:
        if self._coming is not None:
            self._coming.result()
        return super().settle(step)

    def state(self) -> dict[str, Any]:
        if self._coming is None:
            return super().state()
        coming = to_plain(self._coming.result())  # before the rest: its scores are part of that
        return {**super().state(), "coming": coming}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        if "coming" in state:
            self._coming = Future()
            self._coming.set_result(from_plain(state["coming"], self._tasks))

    def close(self) -> None:
        """The thread ends at its next sample. One that waits for a rank which has failed elsewhere is left
        behind: the others are yet to be told (parallel/watch.py), and end it when they go.
        """
        self._collector.abandoned = True
        if self._coming is not None:
            wait([self._coming], timeout=CLOSING_S if self._collector.waits_for_others else None)
        self._thread.shutdown(wait=False)


def to_plain(made: Round) -> dict[str, Any]:
    """A round as numbers and text. Problems are left out: they are functions of index and level."""
    return {
        **{name: value for name, value in vars(made).items() if name != "groups"},
        "groups": [[_plain_rollout(rollout) for rollout in group.rollouts] for group in made.groups],
    }


def _plain_rollout(rollout: Rollout) -> dict[str, Any]:
    completion = {**vars(rollout.completion), "finish": str(rollout.completion.finish)}
    score = {**vars(rollout.score), "parts": dict(rollout.score.parts)}
    return {**vars(rollout), "completion": completion, "score": score}


def from_plain(state: dict[str, Any], tasks: Mixture) -> Round:
    """`to_plain` undone."""
    groups = [
        Group(
            problem=tasks.problem(index, state["levels"]),
            rollouts=tuple(_rollout(rollout) for rollout in rollouts),
        )
        for index, rollouts in zip(state["indices"], state["groups"], strict=True)
    ]
    return Round(**{**state, "groups": groups})


def _rollout(state: dict[str, Any]) -> Rollout:
    completion = Completion(**{**state["completion"], "finish": Finish(state["completion"]["finish"])})
    return Rollout(**{**state, "completion": completion, "score": Score(**state["score"])})
