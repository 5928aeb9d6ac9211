"""Compiles the layers of a policy. They differ in their weights only, so a few graphs serve all of them.

The whole model at once would take minutes. FSDP gathers weights outside of what is compiled.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from whetstone.config.sections import ModelConfig
from whetstone.model.fused_lora import fuse_lora
from whetstone.model.hub import cache_folder
from whetstone.model.policy import Policy
from whetstone.model.size import num_parameters
from whetstone.parallel.fsdp import hide_fsdp_from_dynamo

COMPILED_FROM = 50_000_000  # parameters


def should_compile(config: ModelConfig, policy: Policy) -> bool:
    """`auto`: on a GPU, where the model is large enough for a compiler's half minute to come back."""
    # The compiler fails on distributed tensors with lengths that vary, and padded rows vary in two ways.
    if policy.ranks.tp_size > 1 or not policy.is_packed:
        return False
    if config.torch_compile != "auto":
        return config.torch_compile
    return policy.device.type == "cuda" and num_parameters(policy.model) >= COMPILED_FROM


def compile_layers(policy: Policy, backend: str | Callable[..., Any] = "inductor") -> None:
    """Every layer on its own, for any number of tokens; the compiler runs at the first pass."""
    folder = cache_folder() / "compiled"  # for the next run: torch's own folder is emptied at a restart
    with contextlib.suppress(OSError):  # a home that can't be written
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    # Floats of a layer (the epsilon of a norm, the scale of an adapter) are constants. Otherwise each becomes
    # a CPU tensor of the graph, with a C++ kernel that takes seconds to compile.
    torch._dynamo.config.specialize_float = True
    if policy.is_lora:  # behind frozen embeddings the first layer would get graphs of its own
        policy.lm.get_input_embeddings().register_forward_hook(_require_grad)
        fuse_lora(policy.layers)
    for layer in policy.layers:
        hide_fsdp_from_dynamo(layer)
        layer.compile(dynamic=True, backend=backend)


def _require_grad(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """A forward hook: the output takes part in the backward pass, where there is one."""
    return output.requires_grad_() if torch.is_grad_enabled() else output
