"""The native engine: samples in this process, on the policy's own modules and weights, with no copy of them.

Chooses how by the device: pages, fused kernels and captured graphs on a GPU (paged.py), plain slots
elsewhere (slots.py). Both draw the same random numbers for the same seeds.
"""

from collections.abc import Iterator

import torch

from whetstone.engines.base import Engine, Request, Sampled, Sampling
from whetstone.engines.native.cpu import SlotEngine
from whetstone.engines.native.slot_state import CacheShape
from whetstone.errors import UserError
from whetstone.model.policy import Policy

SLOTS_ON_GPU, SLOTS_ON_CPU = 1024, 256
FIRST_WITH_FP8 = (9, 0)  # Hopper, on which it was measured


class NativeEngine:
    """`eight_bits`: decode with 8-bit copies of the MLPs' matrices (eight_bits.py)."""

    def __init__(self, policy: Policy, max_slots: int | None = None, *, eight_bits: bool = False):
        config = policy.config
        shape = CacheShape(
            num_layers=config.num_hidden_layers,
            num_heads=policy.num_cache_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            dtype=policy.dtype,
            device=policy.device,
        )
        self._engine: Engine
        # Ranks that split layers among them decode in step, module by module: the fused kernels need whole
        # ones.
        if policy.device.type == "cuda" and policy.ranks.tp_size == 1:
            from whetstone.engines.native.gpu import PagedEngine

            self._engine = PagedEngine(
                policy, shape, max_slots or SLOTS_ON_GPU, eight_bits=eight_bits and _can(shape)
            )
        elif eight_bits:
            raise UserError(
                "rollout_quantization=fp8 is for the native engine on a GPU, with tp_size 1: leave it out."
            )
        else:
            self._engine = SlotEngine(policy, shape, max_slots or SLOTS_ON_CPU)

    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Sampled]:
        return self._engine.generate(requests, sampling)

    def update_weights(self, policy_version: int) -> None:
        self._engine.update_weights(policy_version)

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def close(self) -> None:
        self._engine.close()


def _can(shape: CacheShape) -> bool:
    """Whether 8-bit products can be had here; the reason, if not."""
    if shape.dtype != torch.bfloat16:
        raise UserError("rollout_quantization=fp8 needs bf16: true.")
    if torch.cuda.get_device_capability(shape.device) < FIRST_WITH_FP8:
        raise UserError(
            "rollout_quantization=fp8 needs a GPU that multiplies 8-bit floats (Hopper or later), and this "
            f"is a {torch.cuda.get_device_name(shape.device)}: leave it out."
        )
    return True
