"""A policy sharded over ranks: tensor parallelism, FSDP, replicas.

Only the first rank reads the model. The others build it on the meta device and receive their shards.
`sampling_copy` is the model without FSDP, for engines: gathered layer by layer after each update.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whetstone.config.sections import ModelConfig, ParallelConfig
from whetstone.errors import UserError
from whetstone.model.card import finish_adapter
from whetstone.model.loading import copy_processor, has_vision, model_class
from whetstone.model.lora import drop_adapters
from whetstone.model.policy import Policy, choose_device, compute_dtype, enable_checkpointing, load_policy
from whetstone.model.sharding import Sharding
from whetstone.parallel import fsdp, tensor
from whetstone.parallel.collectives import run_on_main
from whetstone.parallel.mesh import Ranks


def load_sharded(
    config: ModelConfig, parallel: ParallelConfig, ranks: Ranks, weights: str | Path | None = None
) -> Policy:
    """The policy of a configuration on all ranks; unsharded in a single process."""
    if ranks.mesh is None:
        return load_policy(config, weights)
    device = choose_device(config.device)
    # The first rank loads into the memory of the CPU: shards go to the devices, the whole model may not fit
    # one.
    source = run_on_main(ranks, lambda: _packed(load_policy(config, weights, torch.device("cpu"))))
    return shard_policy(source, config, parallel, ranks, device)


def _packed(policy: Policy) -> Policy:
    if has_vision(policy.lm.config):
        raise UserError(
            f"{type(policy.lm).__name__} has a vision tower, so it needs a single process: start it without "
            "a launcher, or choose a text model."
        )
    if not policy.is_packed:
        raise UserError(
            f"{type(policy.lm).__name__} is trained on padded rows, which needs a single process: start it "
            "without a launcher, or choose a Llama, Qwen, Mistral, SmolLM, Gemma or Phi model."
        )
    return policy


def shard_policy(
    source: Policy | None, config: ModelConfig, parallel: ParallelConfig, ranks: Ranks, device: torch.device
) -> Policy:
    """Shard `source`, which only the first rank has, over all ranks."""
    metadata = run_on_main(ranks, lambda: _metadata(source), to_all=True)
    assert metadata is not None
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if metadata["adapter"] is not None and metadata["adapter"].use_dora:
        raise UserError("use_dora needs whole matrices: train with one process, or leave it out.")
    if config.load_in_4bit:
        raise UserError("load_in_4bit needs whole matrices: train with one process, or leave it out.")
    if ranks.tp_size > 1:
        text = metadata["config"].get_text_config()
        dropout = config.lora_dropout if metadata["adapter"] is not None else 0.0
        tensor.check_plan(text, ranks.tp_size, lora_dropout=dropout)
    compute = compute_dtype(config, device)
    layout = Sharding(
        ranks=ranks,
        build_meta=lambda: _build_meta(metadata, config, compute),
        compute=compute,
        sequence=parallel.sequence_parallel and ranks.tp_size > 1,
        offload=parallel.cpu_offload == "all" and device.type == "cuda",
    )
    model = layout.build_meta()
    logits_layout = layout.split(model, sequence=layout.sequence)
    root = fsdp.Root(model)
    policy = Policy(
        model, metadata["tokenizer"], device, root=root, logits_layout=logits_layout, sharding=layout
    )
    policy.original_attention = metadata["attention"]
    layout.shard(root, policy.trunk)
    fsdp.materialize(root, device, offload=layout.offload)
    fsdp.fill_from_main(model, None if source is None else source.model, device)
    return policy


def sampling_copy(policy: Policy) -> tuple[Policy, Callable[[], None]]:
    """A policy for engines to sample from, and a collective function that copies the newest weights to it."""
    if policy.sharding is None:
        own = policy.copy()
        return own, lambda: _copy_tensors(own.parameters(), policy.parameters())
    layout = policy.sharding
    model = layout.build_meta().to(layout.compute)
    logits_layout = layout.split(model, sequence=False)
    fsdp.materialize(model, policy.device)
    _copy_tensors(model.buffers(), policy.model.buffers())
    replica = Policy(model, policy.tokenizer, policy.device, logits_layout=logits_layout, sharding=layout)
    replica.original_attention = policy.original_attention
    fsdp.copy_gathered(policy.root, policy.model, model, trained_only=False)
    return replica, lambda: fsdp.copy_gathered(policy.root, policy.model, model, trained_only=True)


@torch.no_grad()
def _copy_tensors(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy this rank's parts, whatever their dtypes."""
    for target, source in zip(targets, sources, strict=True):
        fsdp.local(target).copy_(fsdp.local(source))


def trunk_copy(policy: Policy) -> tuple[Any, Callable[[nn.Module], nn.Module]]:
    """A trainable copy of the trunk, its adapter merged, and a function that shards a module that holds it.

    Layers with an adapter give their matrices no gradient (lora_products.py), so the copy has plain ones.
    """
    if policy.sharding is None:
        trunk = copy.deepcopy(policy.trunk)
        if policy.is_lora:
            drop_adapters(trunk, merge=True)
        return trunk.requires_grad_(True), lambda module: module
    layout = policy.sharding
    model = layout.build_meta()
    lm = model.get_base_model() if policy.is_lora else model
    trunk = getattr(lm, lm.base_model_prefix)
    if policy.is_lora:
        drop_adapters(trunk, merge=False)
    layout.split(model, sequence=layout.sequence)
    trunk = trunk.float().requires_grad_(True)

    def shard(module: nn.Module) -> nn.Module:
        layout.shard(module, trunk)
        fsdp.materialize(module, policy.device, offload=layout.offload)
        sources = {n: p for n, p in policy.trunk.named_parameters() if "lora_" not in n}
        _copy_tensors(trunk.parameters(), sources.values())
        _copy_tensors(trunk.buffers(), policy.trunk.buffers())
        for name, target in zip(sources, trunk.parameters(), strict=True):
            if name.endswith(".base_layer.weight"):
                _add_adapter(target, policy.trunk.get_submodule(name.removesuffix(".base_layer.weight")))
        return module

    return trunk, shard


@torch.no_grad()
def _add_adapter(weight: Tensor, layer: Any) -> None:
    """Add what a LoRA layer adds to this rank's part of its matrix; a collective call."""
    whole = fsdp.full(weight.detach()).clone()
    for name in layer.active_adapters:
        down, up = (fsdp.full(part[name].weight.detach()) for part in (layer.lora_A, layer.lora_B))
        whole += layer.scaling[name] * (up.float() @ down.float())
    fsdp.copy_into(weight, whole)


def shard_alone(policy: Policy, module: nn.Module) -> nn.Module:
    """Shard a small float32 module where the policy is sharded."""
    if policy.sharding is not None:
        layout = policy.sharding
        fsdp.shard(module, [], layout.ranks, compute=torch.float32, offload=layout.offload)
    return module


def _metadata(source: Policy | None) -> dict[str, Any]:
    assert source is not None
    return {
        "config": source.lm.config,
        "generation": source.lm.generation_config,
        "adapter": source.model.peft_config["default"] if source.is_lora else None,
        "attention": source.original_attention,
        "tokenizer": source.tokenizer,
    }


def _build_meta(metadata: dict[str, Any], config: ModelConfig, compute: torch.dtype) -> Any:
    """The model on the meta device. Trainable weights are float32, frozen ones in the compute dtype."""
    adapter = metadata["adapter"]
    with torch.device("meta"):
        model: Any = model_class(metadata["config"]).from_config(
            copy.deepcopy(metadata["config"]), dtype=torch.float32 if adapter is None else compute
        )
    model.generation_config = copy.deepcopy(metadata["generation"])
    if adapter is not None:
        from whetstone.model.lora import wrap_lora

        model = wrap_lora(model, adapter)
    enable_checkpointing(model, config)
    return model


def checkpoint_tensors(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of all that a checkpoint of the model holds: its parameters, those that are shared
    once, and its persistent buffers (the router's bias of DeepSeek V3).
    """
    parameters = dict(lm.named_parameters(remove_duplicate=False))
    yield from lm.named_parameters()
    yield from ((name, tensor) for name, tensor in lm.state_dict().items() if name not in parameters)


def model_writer(policy: Policy) -> Callable[[Path], None]:
    """Gather and copy the weights on all ranks; the first calls the result, which writes them."""
    state: dict[str, Tensor] = {}  # on the CPU of the first rank; empty on the others
    tensors = policy.model.named_parameters() if policy.is_lora else checkpoint_tensors(policy.lm)
    for name, source in tensors:
        if policy.is_lora and not source.requires_grad:  # an adapter is saved alone
            continue
        whole = fsdp.full(source.detach())
        if policy.ranks.is_main:
            is_shard = policy.sharding is not None and not policy.is_lora and isinstance(source, nn.Parameter)
            state[name] = whole.to("cpu", dtype=policy.dtype if is_shard else whole.dtype, copy=True)

    def write(folder: Path) -> None:
        # Weights that are shared (embedding and output) go under one name, as transformers expects.
        policy.model.save_pretrained(folder, state_dict=state)
        policy.tokenizer.save_pretrained(folder)
        copy_processor(policy.lm, folder)
        finish_adapter(folder)
        # transformers would write the dtype of the shards, float32.
        if policy.sharding is not None and not policy.is_lora:
            path = folder / "config.json"
            metadata = json.loads(path.read_text())
            metadata["dtype"] = str(policy.dtype).removeprefix("torch.")
            path.write_text(json.dumps(metadata, indent=2, sort_keys=True) + "\n")

    return write
