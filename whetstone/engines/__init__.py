"""Who samples. `make_engine` builds the engine a configuration names; each lives in a file of its own."""

from typing import TYPE_CHECKING

from whetstone.errors import UserError

if TYPE_CHECKING:  # the seam in base.py is used by rooms that need no torch
    from whetstone.config import Config
    from whetstone.engines.base import Engine
    from whetstone.model.policy import Policy


def make_engine(config: "Config", policy: "Policy") -> "Engine":
    """The engine that samples from `policy`. With `async_rollouts` it has weights of its own, which change
    at `update_weights` only: those that share the policy's get a copy to work on. So they do where the
    policy is spread over ranks.
    """
    if config.rollout.rollout_engine in ("vllm", "sglang"):  # they have weights of their own
        return _outside(config, policy)
    if policy.spread is not None:
        from whetstone.engines.gathered_copy import GatheredEngine

        return GatheredEngine(policy, lambda copy: _on_its_weights(config, copy))
    if not config.rollout.async_rollouts:
        return _on_its_weights(config, policy)
    if config.rollout.rollout_engine == "native" and policy.device.type == "cuda":
        raise UserError(
            "async_rollouts: 1 can't be had with the native engine on a GPU yet: it captures graphs, during "
            "which no other thread may use the GPU: set async_rollouts=0, or rollout_engine=hf."
        )
    from whetstone.engines.policy_copy import Apart

    own = policy.copy()
    return Apart(_on_its_weights(config, own), policy, own)


def _outside(config: "Config", policy: "Policy") -> "Engine":
    if policy.spread is not None:
        return _outside_of_ranks(config, policy)
    if config.rollout.rollout_engine == "vllm" and config.rollout.vllm_mode == "colocate":
        from whetstone.engines.servers.vllm.colocated import ColocatedVLLM

        return ColocatedVLLM(config, policy)
    from whetstone.engines.servers.setup import make_fleet

    return make_fleet(config, policy)


def _outside_of_ranks(config: "Config", policy: "Policy") -> "Engine":
    """Servers that all ranks share: each asks them for its own samples, the first sends the weights."""
    check_servers_of_ranks(config)
    from whetstone.engines.gathered_copy import GatheredEngine
    from whetstone.engines.servers.pool import Team
    from whetstone.engines.servers.setup import make_fleet
    from whetstone.parallel.collectives import from_main

    ranks = policy.ranks
    team = Team(leads=ranks.is_main, tell=lambda what: from_main(ranks, what))
    return GatheredEngine(policy, lambda copy: make_fleet(config, copy, team))


def check_servers_of_ranks(config: "Config") -> None:
    if config.parallel.tp_size > 1 or config.rollout.vllm_mode == "colocate":
        raise UserError(
            f"rollout_engine: {config.rollout.rollout_engine} works with several ranks as a server and with "
            "tp_size 1 so far: set vllm_mode=server and tp_size=1 (FSDP shards the model), or "
            "rollout_engine=native."
        )


def _on_its_weights(config: "Config", policy: "Policy") -> "Engine":
    if config.rollout.rollout_engine == "hf":
        from whetstone.engines.hf import HFEngine

        return HFEngine(policy, config.rollout.max_num_seqs or 256, config.model.attn_implementation)
    from whetstone.engines.native import NativeEngine

    eight_bits = config.rollout.rollout_quantization == "fp8"
    return NativeEngine(policy, config.rollout.max_num_seqs, eight_bits=eight_bits)
