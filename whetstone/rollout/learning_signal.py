"""Warnings of a run: what fails, and a gradient of 0 (several batches in a row without differing rewards)."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from whetstone.config import Config
from whetstone.rollout.failures import REMEDIES, failures
from whetstone.terminal.text import counted
from whetstone.types import Finish, Group

logger = logging.getLogger("whetstone")

PATIENCE = 3  # batches without variance before the warning


class Reason(NamedTuple):
    """Why nothing can be learned, and what to change."""

    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text}. {self.remedy}"


class LearningSignal:
    """Call `observe` with the groups of each batch."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._groups: list[Group] = []
        self._num_batches = 0
        self._warned = False
        self._failing: set[str] = set()  # kinds that were named

    def observe(self, groups: Sequence[Group]) -> None:
        """Count a batch; warn once of each kind of failure, and when the third in a row has no variance."""
        for failure in failures(groups):
            if failure.kind not in self._failing:
                self._failing.add(failure.kind)
                logger.warning(f"{failure.text[:1].upper()}{failure.text[1:]}. {REMEDIES[failure.kind]}")
        if has_learning_signal(groups, self._config):
            self._groups, self._num_batches = [], 0
            return
        self._num_batches += 1
        self._groups = [*self._groups, *groups]
        if self._num_batches >= PATIENCE and not self._warned:
            self._warned = True
            reason = explain_equal_rewards(self._groups, self._config)
            logger.warning(f"Nothing to learn from in {self._num_batches} steps in a row: {reason}")
        if self._warned:
            self._groups = []


def has_signal(group: Group, config: Config) -> bool:
    """Whether a group has advantages that are not 0. `group` and `rloo` need rewards that differ in it."""
    by_turn = config.environments.turn_credit == "turn"
    return config.loss.advantage not in ("group", "rloo") or group.rewards_differ(by_turn=by_turn)


def has_learning_signal(groups: Sequence[Group], config: Config) -> bool:
    """Whether rewards differ among the completions that the advantage compares."""
    if config.loss.advantage in ("group", "rloo"):  # the completions of one prompt
        return any(has_signal(group, config) for group in groups)
    return len({rollout.score.reward for group in groups for rollout in group.rollouts}) > 1


def explain_equal_rewards(groups: Sequence[Group], config: Config) -> Reason:
    """Why all rewards are the same."""
    for failure in failures(groups):
        if failure.is_rule:
            return Reason(failure.text, REMEDIES[failure.kind])
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    number = counted(len(rollouts), "completion")
    scored = [rollout for rollout in rollouts if rollout.score.failure is None]
    is_judged = any("correct" in rollout.score.parts for rollout in scored) or not scored
    right = sum(rollout.score.parts.get("correct", 0.0) >= 1 for rollout in scored)
    cut = sum(rollout.completion.finish is Finish.LENGTH for rollout in rollouts)
    unread = sum(rollout.score.answer is None for rollout in rollouts)
    if right == len(rollouts):
        return Reason(
            f"all {number} were right", "Make the problems harder (datasets, or curriculum), or stop."
        )
    if not is_judged:  # rows without answers
        return Reason(f"all {number} were paid the same", "See what reward_funcs pays, or raise temperature.")
    if right == 0 and cut > len(rollouts) / 2:
        limit = config.rollout.max_completion_length
        return Reason(
            f"{cut:,} of {number} reached max_completion_length ({limit}), none was right", "Raise it."
        )
    if right == 0 and unread > len(rollouts) / 2:
        return Reason(
            f"no answer was found in {unread:,} of {number}",
            "Ask for the form of the answer (developer_prompt), pay for it (reward_funcs=[accuracy,format]), "
            "or take an instruct model.",
        )
    if right == 0:
        return Reason(
            f"all {number} were wrong",
            "Make the problems easier (datasets, or curriculum), raise num_generations, or take a stronger "
            "model_name_or_path.",
        )
    return Reason(
        f"{right:,} of {number} were right, but those compared with each other were all paid the same",
        "Raise temperature or num_generations, set dynamic_sampling=true, and see what reward_funcs pays.",
    )
