"""Compiled layers that FSDP shards: the gradients of layers that run as they are written, compiled once."""

from typing import Any

import pytest
import torch

from tests.conftest import make_policy
from tests.distributed.launch import run_on
from tests.support.ranks import CPU, difference, my_batches
from tests.support.update import make_samples, train_on, updater_for
from whetstone.config.sections import ModelConfig, ParallelConfig
from whetstone.model.compilation import compile_layers, should_compile
from whetstone.model.policy import Policy
from whetstone.model.sharded import shard_policy
from whetstone.parallel import fsdp, mesh

# Prompts and completions of the six samples: one, three (the other rank has one micro-batch less), all.
PIECES = [slice(5, 6), slice(2, 5), slice(0, 6)]


def gradients(policy: Policy, samples: list[Any], pieces: list[slice]) -> tuple[list[Any], list[int]]:
    """The gradients of each piece in a step of its own, and how many graphs there were after each."""
    updater, found, graphs = updater_for(policy), [], []
    updater.optimizer.step = lambda norm: found.append(
        [fsdp.full(p.grad).clone() for p in policy.parameters() if p.grad is not None]
    )
    for piece in pieces:
        train_on(updater, [my_batches(samples[piece], policy.ranks)])
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return found, graphs


def on_ranks(given: dict[str, Any], again: bool) -> dict[str, Any]:
    """What compiled layers do beside plain ones, with FSDP alone."""
    parallel = ParallelConfig(**given)
    with mesh.start(parallel, "cpu") as ranks:
        samples = make_samples(make_policy())
        plain, compiled = (
            shard_policy(make_policy() if ranks.is_main else None, model, parallel, ranks, CPU)
            for model in (ModelConfig(), ModelConfig(gradient_checkpointing=again))
        )
        varying: list[int] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            """As in tests/model/test_compiled.py no code is made. Which sizes may vary is looked at where the
            weights of attention or of the MLP are: tokens, and no number of the model.
            """
            sizes = {str(one) for one in inputs if isinstance(one, torch.SymInt)}
            if sum(isinstance(one, torch.Tensor) and one.dim() == 2 for one in inputs) == 3:
                varying.append(len(sizes))
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        compile_layers(compiled, backend)
        expected, _ = gradients(plain, samples, PIECES)
        found, graphs = gradients(compiled, samples, PIECES)
        pairs = [pair for a, b in zip(expected, found, strict=True) for pair in zip(a, b, strict=True)]
        choices = [should_compile(ModelConfig(torch_compile=choice), plain) for choice in (True, "auto")]
        return {
            "difference": max(difference(a, b) for a, b in pairs),
            "graphs": graphs,
            "varying": set(varying),
            "chosen": choices,
        }


def check(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["difference"] < 1e-5
        assert 0 < one["graphs"][0] <= 8 and len(set(one["graphs"])) == 1, "compiled again for another length"
        assert one["varying"] == {1}
        assert one["chosen"] == [True, False]  # `auto` not on a CPU


@pytest.mark.slow
def test_compiled_shards_have_the_gradient_of_plain_ones_and_are_compiled_once():
    check(run_on(2, on_ranks, {}, False))


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"ddp_size": 2}], ids=["shards", "replicas"])
def test_compiled_shards_may_run_again_in_the_backward_pass(given):
    check(run_on(2, on_ranks, given, True))


def choices() -> list[bool]:
    parallel = ParallelConfig(tp_size=2)
    with mesh.start(parallel, "cpu") as ranks:
        policy = shard_policy(make_policy() if ranks.is_main else None, ModelConfig(), parallel, ranks, CPU)
        return [should_compile(ModelConfig(torch_compile=choice), policy) for choice in (True, "auto")]


def test_layers_that_are_split_are_not_compiled():
    assert run_on(2, choices) == [[False, False]] * 2
