"""Compiled layers: the same gradients, one set of graphs for all layers, whatever the lengths."""

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from tests.conftest import make_policy
from tests.support import plain_flash  # noqa: F401
from tests.support.update import gradient_of, make_samples, train_on, updater_for, with_lora
from whetstone.model.compilation import compile_layers
from whetstone.model.policy import Policy
from whetstone.update.packing import pack


def policy_of(name: str) -> Policy:
    """`name`: an architecture, and `with LoRA`."""
    architecture, *lora = name.split(" with ")
    policy = make_policy(architecture)
    return with_lora(policy) if lora else policy


@pytest.mark.parametrize(
    "architecture",
    [
        "qwen3",
        "qwen3 with LoRA",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "gemma2", "gemma3", "phi3")),
    ],
)
def test_compiled_layers_have_equal_gradient_compiled_once(architecture):
    # Without a code generator: which graphs there are, and what they compute, does not depend on it.
    torch._dynamo.reset()
    samples = make_samples(policy_of(architecture))
    pieces = [samples[:2], samples[2:5], samples]
    plain = [gradient_of(updater_for(policy_of(architecture)), pack(piece, 1000))[0] for piece in pieces]
    policy = policy_of(architecture)
    compile_layers(policy, backend="aot_eager")
    torch._dynamo.utils.counters.clear()  # which a reset does not
    graphs = torch._dynamo.utils.counters["stats"]
    for number, piece in enumerate(pieces):
        gradient, _ = gradient_of(updater_for(policy), pack(piece, 1000))
        policy.model.zero_grad()
        assert (gradient - plain[number]).norm() / plain[number].norm() < 1e-5
        if number == 0:
            once = graphs["unique_graphs"]
        assert graphs["unique_graphs"] == once, "compiled again for another length"
    assert 0 < once <= 8, once
    torch._dynamo.reset()


@pytest.mark.parametrize("use_peft", [False, True])
def test_all_layers_share_graphs_without_scalars_on_the_cpu(use_peft):
    """A float that is an input of the graph costs a C++ compilation; frozen embeddings, one set of graphs."""
    torch._dynamo.reset()
    policy = policy_of("qwen3 with LoRA" if use_peft else "qwen3")
    samples = make_samples(policy)
    scalars, num_graphs = [], 0

    def backend(module, inputs):
        nonlocal num_graphs
        num_graphs += 1
        scalars.extend(x for x in inputs if isinstance(x, torch.Tensor) and x.dim() == 0)
        return module.forward

    compile_layers(policy, backend)
    train_on(updater_for(policy), [pack(samples, 1000)])
    assert not scalars
    assert num_graphs == 4  # before and after the attention, each of two functions
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("architecture", "operation"),
    [
        ("qwen3", "packed_attention"),
        ("qwen3 with LoRA", "tiled_attention"),
        ("mistral", "packed_attention"),
    ],
)
def test_a_layer_is_one_graph_around_its_attention(architecture, operation, monkeypatch):
    """On a GPU. Here the operation has a plain kernel, and all else is as it is there."""
    torch._dynamo.reset()
    samples = make_samples(policy_of(architecture))
    pieces = [samples[2:5], samples, samples[3:], samples[5:]]
    plain = [gradient_of(updater_for(policy_of(architecture)), pack(piece, 1000))[0] for piece in pieces]
    monkeypatch.setattr("whetstone.model.policy.uses_flash", lambda *_: True)
    if operation == "tiled_attention":
        monkeypatch.setattr("whetstone.model.tiled_attention.has_kernels", lambda *_: True)
    policy = policy_of(architecture)
    graphs = []

    def backend(module, inputs):
        graphs.append(str(module.graph))
        return aot_eager(module, inputs)

    compile_layers(policy, backend)
    num_graphs = []
    for number, piece in enumerate(pieces):
        gradient, _ = gradient_of(updater_for(policy), pack(piece, 1000))
        policy.model.zero_grad()
        assert (gradient - plain[number]).norm() / plain[number].norm() < 1e-5
        num_graphs.append(len(graphs))
    assert num_graphs == [1] * len(pieces)
    assert all(graph.count(f"torch.ops.whetstone.{operation}") == 1 for graph in graphs)
    torch._dynamo.reset()
