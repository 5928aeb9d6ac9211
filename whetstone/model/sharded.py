"""A policy spread over all ranks: tensor-parallel neighbours, FSDP shards, replicas.

Only the first rank reads the model; the others get its configuration and tokenizer, build it without
weights, and receive their shards. `sampling_copy` is the same model without FSDP for the engines to sample
from: gathered a layer at a time after each update, whole on every rank or split among tensor-parallel
neighbours only. Knows no losses.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whetstone.config.parallel import ParallelConfig
from whetstone.config.sections import ModelConfig
from whetstone.model.card import finish_adapter
from whetstone.model.policy import Policy, choose_device, compute_dtype, enable_checkpointing, load_policy
from whetstone.model.sharding import Sharding
from whetstone.parallel import fsdp, tensor
from whetstone.parallel.collectives import main_first
from whetstone.parallel.mesh import Ranks


def load_spread(
    config: ModelConfig, parallel: ParallelConfig, ranks: Ranks, weights: str | Path | None = None
) -> Policy:
    """The policy of a configuration on all ranks; alone, whole on one device."""
    if ranks.mesh is None:
        return load_policy(config, weights)
    device = choose_device(config.device)
    # The first rank loads into the memory of the CPU: shards go to the devices, the whole model may not fit
    # one.
    source = main_first(ranks, lambda: load_policy(config, weights, torch.device("cpu")))
    return spread(source, config, parallel, ranks, device)


def spread(
    source: Policy | None, config: ModelConfig, parallel: ParallelConfig, ranks: Ranks, device: torch.device
) -> Policy:
    """Spread `source`, which only the first rank has, over all of them."""
    about = main_first(ranks, lambda: _about(source), to_all=True)
    assert about is not None
    if device.type == "cuda":
        device = torch.device("cuda", ranks.local_rank)
    if ranks.tp_size > 1:
        text = about["config"].get_text_config()
        dropout = config.lora_dropout if about["adapter"] is not None else 0.0
        tensor.check_plan(text, ranks.tp_size, lora_dropout=dropout)
    compute = compute_dtype(config, device)
    layout = Sharding(
        ranks=ranks,
        blank=lambda: _blank(about, config, compute),
        compute=compute,
        sequence=parallel.sequence_parallel and ranks.tp_size > 1,
        offload=parallel.cpu_offload == "all" and device.type == "cuda",
    )
    model = layout.blank()
    vocabulary = layout.split(model, sequence=layout.sequence)
    root = fsdp.Root(model)
    policy = Policy(model, about["tokenizer"], device, root=root, vocabulary=vocabulary, spread=layout)
    policy.own_attention = about["attention"]
    layout.shard(root, policy.trunk)
    fsdp.materialise(root, device, offload=layout.offload)
    fsdp.fill_from_main(model, None if source is None else source.model, device)
    return policy


def sampling_copy(policy: Policy) -> tuple[Policy, Callable[[], None]]:
    """A policy for engines to sample from, and what brings it up to date (all ranks must call it)."""
    if policy.spread is None:
        return policy, lambda: None
    layout = policy.spread
    model = layout.blank().to(layout.compute)
    vocabulary = layout.split(model, sequence=False)
    fsdp.materialise(model, policy.device)
    with torch.no_grad():
        for (_, into), (_, buffer) in zip(model.named_buffers(), policy.model.named_buffers(), strict=True):
            fsdp.local(into).copy_(fsdp.local(buffer))
    twin = Policy(model, policy.tokenizer, policy.device, vocabulary=vocabulary, spread=layout)
    twin.own_attention = policy.own_attention
    fsdp.copy_gathered(policy.root, policy.model, model, trained_only=False)
    return twin, lambda: fsdp.copy_gathered(policy.root, policy.model, model, trained_only=True)


def trunk_copy(policy: Policy) -> tuple[Any, Callable[[nn.Module], nn.Module]]:
    """A trunk with the policy's weights, all of which train, and what shards a module that holds it."""
    if policy.spread is None:
        return copy.deepcopy(policy.trunk).requires_grad_(True), lambda module: module
    layout = policy.spread
    model = layout.blank()
    layout.split(model, sequence=layout.sequence)
    lm = model.get_base_model() if policy.is_lora else model
    trunk = getattr(lm, lm.base_model_prefix).float().requires_grad_(True)

    def shard(module: nn.Module) -> nn.Module:
        layout.shard(module, trunk)
        fsdp.materialise(module, policy.device, offload=layout.offload)
        with torch.no_grad():
            for into, weight in zip(trunk.parameters(), policy.trunk.parameters(), strict=True):
                fsdp.local(into).copy_(fsdp.local(weight))
            for into, buffer in zip(trunk.buffers(), policy.trunk.buffers(), strict=True):
                fsdp.local(into).copy_(fsdp.local(buffer))
        return module

    return trunk, shard


def shard_alone(policy: Policy, module: nn.Module) -> nn.Module:
    """A small module of its own beside the policy, sharded where the policy is; float32."""
    if policy.spread is not None:
        layout = policy.spread
        fsdp.shard(module, [], layout.ranks, compute=torch.float32, offload=layout.offload)
    return module


def full_weights(policy: Policy) -> Any:
    """Names and whole weights, one at a time, in the dtype the model computes in. All ranks must go through
    them.

    For engines outside the process.
    """
    for name, parameter in policy.model.named_parameters():
        yield name, fsdp.full(parameter.detach()).to(policy.dtype)


def _about(source: Policy | None) -> dict[str, Any]:
    assert source is not None
    return {
        "config": source.lm.config,
        "generation": source.lm.generation_config,
        "adapter": source.model.peft_config["default"] if source.is_lora else None,
        "attention": source.own_attention,
        "tokenizer": source.tokenizer,
    }


def _blank(about: dict[str, Any], config: ModelConfig, compute: torch.dtype) -> Any:
    """The model without weights. What trains is float32; frozen weights below an adapter are as they
    compute.
    """
    from transformers import AutoModelForCausalLM

    adapter = about["adapter"]
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(about["config"]), dtype=torch.float32 if adapter is None else compute
        )
    model.generation_config = copy.deepcopy(about["generation"])
    if adapter is not None:
        from whetstone.model.lora import wrap_lora

        model = wrap_lora(model, adapter)
    enable_checkpointing(model, config)
    return model


def model_writer(policy: Policy) -> Callable[[Path], None]:
    """What writes the model as it is now, later: all ranks make it, the first calls it.

    Where weights are spread they are gathered now; where they are whole they are copied, for they will move
    on.
    """
    state = gathered_state(policy)

    def write(folder: Path) -> None:
        # Weights that are shared (embedding and output) go under one name, as transformers expects.
        policy.model.save_pretrained(folder, state_dict=state)
        policy.tokenizer.save_pretrained(folder)
        finish_adapter(folder)
        if (
            policy.spread is not None and not policy.is_lora
        ):  # transformers asks the shards, which are float32
            path = folder / "config.json"
            about = json.loads(path.read_text())
            about["dtype"] = str(policy.dtype).removeprefix("torch.")
            path.write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")

    return write


def gathered_state(policy: Policy) -> dict[str, Tensor]:
    """A copy of what transformers saves (LoRA: the adapter), on the CPU of the first rank; empty on the
    others.
    """
    state: dict[str, Tensor] = {}
    for name, parameter in policy.model.named_parameters():
        if policy.is_lora and not parameter.requires_grad:
            continue
        whole = fsdp.full(parameter.detach())
        if policy.ranks.is_main:
            dtype = whole.dtype if policy.is_lora else policy.dtype
            state[name] = whole.to("cpu", dtype=dtype, copy=True)
    return state
