"""Compiled layers that FSDP shards: the gradients of layers that run as they are written, compiled once."""

from typing import Any

import torch

from tests.conftest import make_policy
from tests.distributed.launch import run_on
from tests.distributed.test_update import CPU, difference, my_batches
from tests.unit.test_update import make_samples, updater_for
from whetstone.config.parallel import ParallelRoom
from whetstone.config.rooms import ModelRoom
from whetstone.model.policy import Policy, should_compile
from whetstone.model.spread import spread
from whetstone.parallel import fsdp, mesh

# Prompts and completions of the six samples: one, three (the other rank has one micro-batch less), all.
PIECES = [slice(5, 6), slice(2, 5), slice(0, 6)]


def gradients(policy: Policy, samples: list[Any], pieces: list[slice]) -> tuple[list[Any], list[int]]:
    """The gradients of each piece in a step of its own, and how many graphs there were after each."""
    updater, found, graphs = updater_for(policy), [], []
    updater._move = lambda norm: found.append([fsdp.full(p.grad).clone() for p in policy.parameters])
    for piece in pieces:
        updater.step([my_batches(samples[piece], policy.ranks)], seed=0)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return found, graphs


def on_two() -> tuple[float, list[int], list[bool]]:
    """How far compiled gradients are from plain ones, the numbers of graphs, and what is compiled by
    itself.
    """
    with mesh.start(ParallelRoom(), "cpu") as ranks:
        samples = make_samples(make_policy())
        policies = []
        for again in (False, False, True):
            source = make_policy() if ranks.is_main else None
            room = ModelRoom(gradient_checkpointing=again)
            policies.append(spread(source, room, ParallelRoom(), ranks, CPU))
        plain, _ = gradients(policies[0], samples, PIECES)
        policies[1].compile_layers(backend="aot_eager")  # as tests/unit/test_compiled.py: no code is made
        compiled, graphs = gradients(policies[1], samples, PIECES)
        policies[2].compile_layers(backend="aot_eager")
        again, _ = gradients(policies[2], samples, PIECES[2:])
        pairs = zip([*plain, plain[2]], [*compiled, *again], strict=True)
        worst = max(difference(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))
        split = ParallelRoom(tp_size=2)
        source = make_policy() if ranks.is_main else None
        split_policy = spread(source, ModelRoom(), split, mesh.make_ranks(split, "cpu"), CPU)
        chosen = [
            should_compile(ModelRoom(torch_compile=choice), policy)
            for choice, policy in ((True, policies[0]), ("auto", policies[0]), (True, split_policy))
        ]
        return worst, graphs, chosen


def test_compiled_shards_have_the_gradient_of_plain_ones_and_are_compiled_once():
    for worst, graphs, chosen in run_on(2, on_two):
        assert worst < 1e-5
        assert 0 < graphs[0] <= 4 and graphs == [graphs[0]] * 3, "compiled again for another length"
        assert chosen == [True, False, False]  # by `auto` not on a CPU; split layers never
