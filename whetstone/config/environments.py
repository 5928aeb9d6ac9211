"""The section of environments: episodes of several turns."""

from typing import Literal

from pydantic import Field

from whetstone.config.base import Section


class EnvironmentsConfig(Section):
    """Episodes of several turns, and the processes that environments run in."""

    max_turns: int = Field(default=8, ge=1, le=10_000)
    """How often the policy may speak in an episode. max_completion_length is for all turns together."""
    max_observation_length: int = Field(default=1024, ge=1, le=16_777_216)
    """Tokens of an environment's answer; longer ones lose their middle."""
    environment_timeout_s: float = Field(default=30.0, gt=0, le=86_400)
    """An environment that takes longer to answer has failed, and its rollout earns 0."""
    environment_memory_mb: int = Field(default=2048, ge=16, le=10_000_000)
    """Memory that one episode's process may take beyond what its import took."""
    turn_credit: Literal["episode", "turn"] = "episode"
    """What a turn is credited with: the reward of its whole episode, or the rewards from that turn on."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """With `turn_credit: turn`: the factor of a reward for each turn that it lies ahead."""

    @property
    def credited_turns(self) -> int:
        """Turns of an episode that have advantages of their own; 1: all of its tokens share one."""
        return self.max_turns if self.turn_credit == "turn" else 1
