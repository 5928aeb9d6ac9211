"""The processes of an agent and the endpoint that it asks, for a run whose rollouts come from one."""

import contextlib

from whetstone.config import Config
from whetstone.endpoint.choice import Codec
from whetstone.environments.agents import AgentPool
from whetstone.errors import UserError
from whetstone.model.chat import Chat
from whetstone.model.policy import Policy
from whetstone.rollout.agents.endpoint import AgentEndpoint
from whetstone.rollout.agents.stream import AgentSettings
from whetstone.tasks.registry import environments_of, problem_rows


def make_agents(
    config: Config, policy: Policy, chat: Chat, stack: contextlib.ExitStack
) -> AgentSettings | None:
    """None where the configuration names no agent."""
    own = config.environments
    if own.agent is None:
        return None
    if names := [*environments_of(config), *own.tools]:
        raise UserError(
            f"An agent brings its own loop and tools, so {names[0]} can't be used with it: leave out agent, "
            "or environments and tools."
        )
    if not config.model.apply_chat_template or policy.ranks.tp_size > 1:
        raise UserError("agent needs apply_chat_template=true and tp_size=1: set these, or leave it out.")
    codec = Codec(chat=chat, stop_ids=frozenset(policy.stop_token_ids))
    pool = AgentPool(own.agent, timeout_s=own.environment_timeout_s, memory_mb=own.environment_memory_mb)
    stack.enter_context(pool)
    endpoint = AgentEndpoint(
        lambda token: chat.decode([token], keep_special=True),
        vocab_size=policy.config.vocab_size,
        max_length=min(own.agent_max_length, policy.max_length or own.agent_max_length),
    )
    stack.enter_context(endpoint)
    return AgentSettings(pool=pool, endpoint=endpoint, config=own, codec=codec, row=problem_rows(config))
