"""The section of environments: episodes of several turns."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from whetstone.config.base import Name, Section
from whetstone.config.plugins import PluginSpec

Names = Annotated[
    list[Name], BeforeValidator(lambda v: [] if v is None else [v] if isinstance(v, str) else v)
]


class EnvironmentsConfig(Section):
    """Episodes of several turns, and the processes that environments run in."""

    max_turns: int = Field(default=8, ge=1, le=10_000)
    """How often the policy may speak in an episode. max_completion_length is for all turns together."""
    tools: Names = Field(default_factory=list)
    """Tools that the policy may call: calculator, python, my_tools.py:multiply, or a class of tools."""
    tool_call_format: Literal["template", "code_block"] = "template"
    """How `tools` are called: as the chat template describes it, or by a block of code, ```python."""
    max_tool_calling_iterations: int | None = Field(default=None, ge=0, le=10_000)
    """How many turns may call tools, as in TRL; one more may follow. None: max_turns is the limit."""
    rollout_func: PluginSpec | None = None
    """TRL's rollout function, my_rollout.py:fn: it gets prompts and returns tokens sampled by our engine."""
    max_observation_length: int = Field(default=1024, ge=1, le=16_777_216)
    """Tokens of an environment's answer; longer ones lose their middle."""
    environment_timeout_s: float = Field(default=30.0, gt=0, le=86_400)
    """An environment that takes longer to answer (an agent: to ask again) has failed, and earns 0."""
    environment_memory_mb: int = Field(default=2048, ge=16, le=10_000_000)
    """Memory that one episode's process may take beyond what its import took."""
    agent: PluginSpec | None = None
    """A function whose calls are the rollouts: my_agent.py:solve, called with (base_url, problem)."""
    agent_max_length: int = Field(default=4096, ge=2, le=16_777_216)
    """Tokens of an agent's whole conversation; the KV cache is made for so many."""
    turn_credit: Literal["episode", "turn"] = "episode"
    """What a turn is credited with: the reward of its whole episode, or the rewards from that turn on."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """With `turn_credit: turn`: the factor of a reward for each turn that it lies ahead."""

    full_determinism: bool = False
    """Turns in rounds: all episodes wait for the slowest, and a run with environments repeats bit for bit."""
