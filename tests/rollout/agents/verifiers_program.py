# pyright: reportMissingImports=false
"""A task by verifiers' own agent, in an environment that has verifiers. Arguments: eval or train, base_url,
prompt, the folder of the tokenizer. `eval` asks in messages, twice; `train` sends tokens, once.

Prints a line of JSON: what the agent said last, its errors, and of sampled messages the tokens.
"""

import asyncio
import json
import sys

from renderers import DefaultRendererConfig
from verifiers.v1.agent import Agent
from verifiers.v1.clients import EvalClientConfig, TrainClientConfig
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.task import Task, TaskData


async def main(kind: str, base_url: str, prompt: str, folder: str) -> None:
    options = {"base_url": base_url, "api_key_var": "NO_SUCH_KEY"}
    client = EvalClientConfig(**options)
    if kind == "train":
        renderer = DefaultRendererConfig()
        client = TrainClientConfig(**options, renderer=renderer, renderer_model_name=folder)
    config = AgentConfig(
        harness={"id": "null"}, runtime=SubprocessConfig(), model="policy", client=client, max_turns=3
    )
    async with Agent(config) as agent, agent.interaction(Task(TaskData(prompt=prompt))) as interaction:
        segment = await interaction.turn()
        if kind == "eval":
            segment = await interaction.turn("Are you sure?")
        trace = interaction.trace
    sampled = [node for node in trace.nodes if node.sampled]
    report = {
        "said": segment.last_reply,
        "errors": [str(error) for error in trace.errors],
        "token_ids": [trained(node.token_ids, node.mask) for node in sampled],
        "logprobs": [list(node.logprobs) for node in sampled],
    }
    print(json.dumps(report))


def trained(token_ids: list[int], mask: list[bool]) -> list[int]:
    """Without the template's tokens in front of the answer."""
    return [token for token, is_sampled in zip(token_ids, mask, strict=True) if is_sampled]


asyncio.run(main(*sys.argv[1:]))
