"""The native engine samples in this process, from the policy's own modules and weights.

GPU (gpu.py) and CPU (cpu.py) use the same random numbers for the same seeds.
"""

import torch

from whetstone.engines.base import EngineWrapper
from whetstone.engines.native.cpu import SlotEngine
from whetstone.engines.native.slot_state import CacheShape
from whetstone.errors import UserError
from whetstone.model.policy import Policy

SLOTS_ON_GPU, SLOTS_ON_CPU = 1024, 256
MIN_FP8_CAPABILITY = (9, 0)  # Hopper, on which it was measured


class NativeEngine(EngineWrapper):
    """`fp8`: decode with 8-bit copies of the MLPs' matrices (fp8.py)."""

    def __init__(self, policy: Policy, max_slots: int | None = None, *, fp8: bool = False):
        shape = CacheShape(
            num_layers=policy.config.num_hidden_layers,
            num_heads=policy.num_cache_heads,
            head_dim=policy.head_dim,
            dtype=policy.dtype,
            device=policy.device,
        )
        # Tensor parallel ranks decode in step, module by module: the fused kernels need whole layers.
        uses_pages = policy.device.type == "cuda" and policy.ranks.tp_size == 1
        if fp8:
            _check_fp8(shape, uses_pages)
        if uses_pages:
            from whetstone.engines.native.gpu import PagedEngine

            engine = PagedEngine(policy, shape, max_slots or SLOTS_ON_GPU, fp8=fp8)
        else:
            engine = SlotEngine(policy, shape, max_slots or SLOTS_ON_CPU)
        super().__init__(engine)
        self.shape, self.max_slots = shape, engine.max_slots
        self.stream = engine.stream


def _check_fp8(shape: CacheShape, uses_pages: bool) -> None:
    if not uses_pages:
        raise UserError(
            "rollout_quantization=fp8 is for the native engine on a GPU, with tp_size 1: leave it out."
        )
    if shape.dtype != torch.bfloat16:
        raise UserError("rollout_quantization=fp8 needs bf16: true.")
    if torch.cuda.get_device_capability(shape.device) < MIN_FP8_CAPABILITY:
        raise UserError(
            "rollout_quantization=fp8 needs a GPU that multiplies 8-bit floats (Hopper or later), and this "
            f"is a {torch.cuda.get_device_name(shape.device)}: leave it out."
        )
