"""Who samples. `make_engine` builds the engine a configuration names; each lives in a file of its own."""

from typing import TYPE_CHECKING

from whetstone.errors import UserError

if TYPE_CHECKING:  # the seam in base.py is used by rooms that need no torch
    from whetstone.config import Config
    from whetstone.engines.base import Engine
    from whetstone.model.policy import Policy


def make_engine(config: "Config", policy: "Policy") -> "Engine":
    """The engine that samples from `policy`. With `async_rollouts` it has weights of its own, which change
    at `update_weights` only: those that share the policy's get a copy to work on.
    """
    if config.rollout.rollout_engine in ("vllm", "sglang"):  # they have weights of their own
        return _outside(config, policy)
    if not config.rollout.async_rollouts:
        return _on_its_weights(config, policy)
    if config.rollout.rollout_engine == "native" and policy.device.type == "cuda":
        raise UserError(
            "async_rollouts: 1 can't be had with the native engine on a GPU yet: it captures graphs, during "
            "which no other thread may use the GPU: set async_rollouts=0, or rollout_engine=hf."
        )
    from whetstone.engines.apart import Apart

    own = policy.copy()
    return Apart(_on_its_weights(config, own), policy, own)


def _outside(config: "Config", policy: "Policy") -> "Engine":
    if config.rollout.rollout_engine == "vllm" and config.rollout.vllm_mode == "colocate":
        from whetstone.engines.vllm.colocated import ColocatedVLLM

        return ColocatedVLLM(config, policy)
    from whetstone.engines.outfit import make_fleet

    return make_fleet(config, policy)


def _on_its_weights(config: "Config", policy: "Policy") -> "Engine":
    if config.rollout.rollout_engine == "hf":
        from whetstone.engines.hf import HFEngine

        return HFEngine(policy, config.rollout.max_slots or 256, config.model.attn_implementation)
    from whetstone.engines.native import NativeEngine

    return NativeEngine(policy, config.rollout.max_slots)
