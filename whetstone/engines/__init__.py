"""Rollout engines; a new one needs traits in config/engine_traits.py and a constructor in `ENGINES`."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from whetstone.config.engine_traits import engine_traits
from whetstone.config.plugins import is_plugin, load_object
from whetstone.errors import UserError

if TYPE_CHECKING:  # base.py is used by packages that need no torch
    from whetstone.config import Config
    from whetstone.engines.base import Engine
    from whetstone.model.policy import Policy

logger = logging.getLogger("whetstone")
METHODS = ("generate", "update_weights", "sleep", "wake", "close")


def make_engine(config: "Config", policy: "Policy") -> "Engine":
    name = config.rollout.rollout_engine
    build = _load_engine(name) if is_plugin(name) else ENGINES[name]
    # In this process it samples from the policy's own weights, unless these are sharded or train meanwhile.
    needs_copy = policy.sharding is not None or config.rollout.async_rollouts
    if engine_traits(name).in_process and needs_copy:
        return _on_copy(policy, lambda copy: build(config, copy))
    return build(config, policy)


def _on_copy(policy: "Policy", build: "Callable[[Policy], Engine]") -> "Engine":
    """An engine on a copy of the policy, refreshed only by `update_weights`."""
    from whetstone.engines.base import SyncedCopyEngine
    from whetstone.model.sharded import sampling_copy

    copy, refresh = sampling_copy(policy)
    return SyncedCopyEngine(build(copy), refresh)


def _load_engine(spec: str) -> Callable[["Config", "Policy"], "Engine"]:
    """The engine class of a user's file; it is constructed as `Engine(config, policy)`."""
    engine_class = load_object(spec, "rollout_engine")
    missing = [name for name in METHODS if not callable(getattr(engine_class, name, None))]
    if missing:
        names = ", ".join(METHODS)
        raise UserError(f"rollout_engine: {spec} has no method {missing[0]}: an engine has {names}.")
    return engine_class


def _native(config: "Config", policy: "Policy") -> "Engine":
    from whetstone.engines.native import NativeEngine

    if not _can_cache(policy):
        return _hf(config, policy)
    if config.rollout.async_rollouts and policy.device.type == "cuda":
        raise UserError(
            "async_rollouts=1 is not supported by the native engine on a GPU, since no other thread may use "
            "it while CUDA graphs are captured: set async_rollouts=0, or rollout_engine=hf."
        )
    return NativeEngine(policy, config.rollout.max_num_seqs, fp8=config.rollout.rollout_quantization == "fp8")


def _can_cache(policy: "Policy") -> bool:
    """Whether keys and values have one shape in all layers, that of the native engine's cache."""
    if not policy.is_packed:
        return False
    expected = {(policy.num_cache_heads * policy.ranks.tp_size, policy.head_dim)}
    if policy.cache_shapes <= expected:  # none noted: a policy that was not verified, in a test
        return True
    from whetstone.model.size import GENERATE

    logger.warning(
        f"The native engine can't run {type(policy.lm).__name__}, whose keys and values have the shapes "
        f"{sorted(policy.cache_shapes)}: it is sampled {GENERATE}."
    )
    return False


def _hf(config: "Config", policy: "Policy") -> "Engine":
    from whetstone.engines.hf import HFEngine

    return HFEngine(policy, config.rollout.max_num_seqs or 256, config.model.attn_implementation)


def _vllm(config: "Config", policy: "Policy") -> "Engine":
    if config.rollout.vllm_mode != "colocate" or policy.sharding is not None:
        return _servers(config, policy)
    from whetstone.engines.servers.vllm.colocated import ColocatedVLLM

    return ColocatedVLLM(config, policy)


def _servers(config: "Config", policy: "Policy") -> "Engine":
    from whetstone.engines.servers.setup import build_server_pool

    if policy.sharding is None:
        return build_server_pool(config, policy)
    check_shared_servers(config)
    from whetstone.engines.servers.pool import ServerSharing
    from whetstone.parallel.collectives import broadcast_from_main

    # All ranks share the servers: each asks for its own samples, the first sends the weights.
    ranks = policy.ranks
    sharing = ServerSharing(ranks.is_main, lambda value: broadcast_from_main(ranks, value))
    return _on_copy(policy, lambda copy: build_server_pool(config, copy, sharing))


def check_shared_servers(config: "Config") -> None:
    if config.parallel.tp_size > 1 or config.rollout.vllm_mode == "colocate":
        raise UserError(
            f"rollout_engine: {config.rollout.rollout_engine} on several ranks needs vllm_mode=server and "
            "tp_size=1 (FSDP shards the model): set these, or rollout_engine=native."
        )


ENGINES: dict[str, Callable[["Config", "Policy"], "Engine"]] = {
    "native": _native,
    "hf": _hf,
    "vllm": _vllm,
    "sglang": _servers,
}
