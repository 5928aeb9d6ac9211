"""Asynchronous rollouts (one step off-policy): a thread samples the next batch during the update.

Used with `async_rollouts: 1`. `sync_weights(t)` waits for batch t, which the weights of t - 1 sampled, and
transfers the weights of t. `next_batch(t)` returns batch t and starts batch t + 1. A checkpoint holds the
pending batch, so a resumed run trains on the same samples. `importance_correction` weighs stale samples.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from whetstone.config import Config, Plan
from whetstone.rollout.collector import Collector
from whetstone.rollout.source import RolloutBatch, RolloutSource
from whetstone.tasks.mixture import Mixture
from whetstone.types import Completion, Episode, Finish, Group, Rollout, Score, Turn

CLOSE_TIMEOUT_S = 10.0  # for other ranks to cancel as well


class AsyncRolloutSource(RolloutSource):
    def __init__(self, collector: Collector, tasks: Mixture, config: Config, plan: Plan):
        super().__init__(collector, tasks, config, plan)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout")
        self._pending: Future[RolloutBatch] | None = None  # the batch after the one returned last

    def sync_weights(self, step: int) -> None:
        """Wait for the pending batch (and raise its error), then transfer the weights."""
        if self._pending is not None:
            self._pending.result()
        super().sync_weights(step)

    def next_batch(self, step: int) -> RolloutBatch:
        """The batch of optimizer step `step`; starts to sample the next one."""
        if self._pending is None:
            rollouts = super().next_batch(step)
        else:
            rollouts = self._observe(self._pending.result(), step)
        next_step = step + self._plan.updates_per_batch
        self._pending = None
        if next_step < self._plan.num_steps:
            self._pending = self._thread.submit(self.sample, next_step)
        return rollouts

    def state(self) -> dict[str, Any]:
        if self._pending is None:
            return super().state()
        pending = to_plain(self._pending.result())  # first: it changes the curriculum
        return {**super().state(), "pending": pending}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        if "pending" in state:
            self._pending = Future()
            self._pending.set_result(from_plain(state["pending"], self._tasks))

    def close(self) -> None:
        """Cancel sampling at its next sample; a thread that waits for a failed rank is left behind."""
        self._collector.cancelled = True
        if self._pending is not None:
            is_collective = self._collector.ranks.world_size > 1
            wait([self._pending], timeout=CLOSE_TIMEOUT_S if is_collective else None)
        self._thread.shutdown(wait=False)


def to_plain(rollouts: RolloutBatch) -> dict[str, Any]:
    """A batch as plain data. Problems are left out: they are functions of index and level."""
    return {
        **{name: value for name, value in vars(rollouts).items() if name != "groups"},
        "groups": [[_plain_rollout(rollout) for rollout in group.rollouts] for group in rollouts.groups],
    }


def _plain_rollout(rollout: Rollout) -> dict[str, Any]:
    turns = [
        {
            "completion": {**vars(turn.completion), "finish": str(turn.completion.finish)},
            "observation_ids": turn.observation_ids,
            "context_ids": turn.context_ids,
        }
        for turn in rollout.turns
    ]
    episode = rollout.episode
    return {
        "prompt_ids": rollout.prompt_ids,
        "turns": turns,
        "text": rollout.text,
        "score": {**vars(rollout.score), "parts": dict(rollout.score.parts)},
        "episode": None if episode is None else {**vars(episode), "finish": str(episode.finish)},
    }


def from_plain(state: dict[str, Any], tasks: Mixture) -> RolloutBatch:
    """The inverse of `to_plain`."""
    problems = [tasks.problem(index, state["levels"]) for index in state["indices"]]
    pairs = zip(problems, state["groups"], strict=True)
    groups = [Group(problem=problem, rollouts=tuple(map(_rollout, group))) for problem, group in pairs]
    return RolloutBatch(**{**state, "groups": groups})


def _rollout(state: dict[str, Any]) -> Rollout:
    turns = [
        Turn(
            completion=_completion(turn["completion"]),
            observation_ids=tuple(turn["observation_ids"]),
            context_ids=tuple(turn.get("context_ids", ())),  # not in old checkpoints
        )
        for turn in state["turns"]
    ]
    episode = state["episode"]
    if episode is not None:
        episode = Episode(**{**episode, "finish": Finish(episode["finish"])})
    return Rollout(**{**state, "turns": tuple(turns), "episode": episode, "score": Score(**state["score"])})


def _completion(state: dict[str, Any]) -> Completion:
    return Completion(**{**state, "finish": Finish(state["finish"])})
