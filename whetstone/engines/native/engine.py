"""The native engine: samples in this process, on the policy's own modules and weights, with no copy of them.

Chooses how by the device: pages, fused kernels and captured graphs on a GPU (paged.py), plain slots
elsewhere (slots.py). Both draw the same random numbers for the same seeds.
"""

from collections.abc import Iterator

from whetstone.engines.base import Engine, Request, Sampled, Sampling
from whetstone.engines.native.layout import CacheShape
from whetstone.engines.native.slots import SlotEngine
from whetstone.model.policy import Policy

SLOTS_ON_GPU, SLOTS_ON_CPU = 1024, 256


class NativeEngine:
    def __init__(self, policy: Policy, max_slots: int | None = None):
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
            from whetstone.engines.native.paged import PagedEngine

            self._engine = PagedEngine(policy, shape, max_slots or SLOTS_ON_GPU)
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
