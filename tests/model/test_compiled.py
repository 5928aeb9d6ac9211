"""Compiled layers: the same gradients, one set of graphs for all layers, whatever the lengths."""

import pytest
import torch

from tests.conftest import make_policy
from tests.support.update import gradient_of, make_samples, updater_for
from whetstone.update.packing import pack


@pytest.mark.parametrize(
    "architecture",
    [
        "qwen3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "gemma2", "gemma3", "phi3")),
    ],
)
def test_compiled_layers_have_the_same_gradient_and_are_compiled_once(architecture):
    # Without a code generator: which graphs there are, and what they compute, does not depend on it.
    torch._dynamo.reset()
    samples = make_samples(make_policy(architecture))
    pieces = [samples[:2], samples[2:5], samples]
    plain = [gradient_of(updater_for(make_policy(architecture)), pack(piece, 1000))[0] for piece in pieces]
    policy = make_policy(architecture)
    policy.compile_layers(backend="aot_eager")
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
