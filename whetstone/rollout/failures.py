"""What failed in a batch, by kind: environments and agents, and the functions that score."""

from collections.abc import Sequence
from dataclasses import dataclass

from whetstone.terminal.text import escape_controls
from whetstone.types import Group

REMEDIES = {
    "environment": "Fix the environment (`whet play NAME` shows an episode).",
    "agent": "Fix the agent.",
    "scoring": "Fix the reward function (`whet check CONFIG --rewards` tries it), or raise reward_timeout_s.",
}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How often something of the user's failed, and how it did first."""

    kind: str  # of `REMEDIES`
    count: int
    total: int
    first: str

    @property
    def text(self) -> str:
        number = f"{self.count:,} of {self.total:,}"
        if self.kind == "scoring":
            return f"scoring failed on {number} completions (first: {self.first})"
        return f"{number} episodes ended by a failure of the {self.kind} (first: {self.first})"

    @property
    def is_rule(self) -> bool:
        """Whether it explains why nothing can be learned."""
        return self.count > self.total / 2


def failures(groups: Sequence[Group]) -> list[Failure]:
    """The kinds that occurred, what happens first in a rollout before the others."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    is_agent = any(group.problem.environment is None for group in groups)  # tools are an environment, too
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    errors = [episode.error for episode in episodes if episode.error is not None]
    scores = [rollout.score.failure for rollout in rollouts if rollout.score.failure is not None]
    kinds = (("agent" if is_agent else "environment", errors, episodes), ("scoring", scores, rollouts))
    return [
        Failure(kind=kind, count=len(reasons), total=len(among), first=escape_controls(reasons[0]))
        for kind, reasons, among in kinds
        if reasons
    ]
