"""Tensor parallelism: each layer's matrices split among neighboring ranks, by transformers' own plan.

Inside attention and MLP activations are split by heads and columns; between them they are whole on every
rank, or with `sequence_parallel` split along the tokens. The vocabulary of embedding and output is split as
well. Works on modules with or without weights, and on peft's LoRA layers.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from whetstone.errors import UserError

Placements = tuple[Placement, ...]
Statistics = tuple[Tensor, Tensor, Tensor | None]
WHOLE = (Replicate(),)
TOKENS = (Shard(1),)  # [B, T, H] split along T
HEADS = (Shard(2),)  # [B, T, heads, D] split by heads
LAST = (Shard(-1),)
STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce")


def check_plan(config: Any, size: int, *, lora_dropout: float) -> None:
    """Refuse what can't be split among `size` ranks; `config` is the text model's."""
    plan = _plan(config)
    if not plan or any(style not in STYLES for style in plan.values()):
        raise UserError(
            f"tp_size: transformers has no tensor-parallel plan for {config.model_type} to be used (Llama, "
            "Qwen, SmolLM, Mistral and Gemma have one): set tp_size to 1 and let FSDP shard the model."
        )
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(config, key)
        if number % size:
            raise UserError(f"tp_size: {key} of this model is {number}: set tp_size to a divisor of it.")
    if lora_dropout:
        raise UserError(
            "lora_dropout draws random numbers that differ between tensor-parallel ranks: set it to 0."
        )


def _plan(config: Any) -> dict[str, str]:
    """Patterns of modules and how each is split, without the tied embedding that transformers 5.17 adds."""
    plan = config.base_model_tp_plan or {}
    return {pattern: style for pattern, style in plan.items() if pattern != "embed_tokens"}


def parallelize(trunk: Any, config: Any, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Split a transformers trunk (the model below its output head) among the ranks of `mesh`."""
    between = TOKENS if sequence else WHOLE
    entries: set[str] = set()
    for pattern, style in _plan(config).items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name, module in [entry for entry in trunk.named_modules() if expression.fullmatch(entry[0])]:
            if style == "colwise":
                _column(module, mesh)
                entries.add(name.rpartition(".")[0])
            elif style == "rowwise":
                _row(module, mesh, between)
            else:  # the norms of queries and keys: one weight for all heads, which are split
                _norm(module, mesh, HEADS, HEADS)
    for name in entries:
        _enter(trunk.get_submodule(name), mesh, between)
    if sequence:
        for layer in trunk.layers:
            for name, module in layer.named_children():
                if "norm" in name:
                    _norm(module, mesh, TOKENS, TOKENS)
        _norm(trunk.norm, mesh, TOKENS, WHOLE)
    embedding = trunk.embed_tokens
    _distribute(embedding, mesh, lambda _: (Shard(0),))
    for name, buffer in list(embedding.named_buffers(recurse=False)):  # Gemma's scale
        embedding._buffers[name] = distribute_tensor(buffer, mesh, WHOLE)
    _around(embedding, mesh, WHOLE, between)


def parallelize_head(head: nn.Module, mesh: DeviceMesh) -> None:
    """Split the output head by its vocabulary; it gives the rank's own slice of the logits."""
    _column(head, mesh)
    _enter(head, mesh, WHOLE)


def _column(module: nn.Module, mesh: DeviceMesh) -> None:
    """Output features are split. In LoRA the second factor makes them; the first stays whole."""
    _distribute(module, mesh, lambda name: WHOLE if "lora_A" in name else (Shard(0),))
    module.register_forward_hook(lambda _, __, out: out.to_local())


def _row(module: nn.Module, mesh: DeviceMesh, after: Placements) -> None:
    """Input features are split, so outputs are partial sums. In LoRA the first factor takes them."""

    def placement(name: str) -> Placements:
        return WHOLE if "lora_B" in name or name.endswith("bias") else (Shard(1),)

    _distribute(module, mesh, placement)
    _around(module, mesh, LAST, after)


def _norm(module: nn.Module, mesh: DeviceMesh, before: Placements, after: Placements) -> None:
    _distribute(module, mesh, lambda _: WHOLE)
    _around(module, mesh, before, after)


def _enter(module: nn.Module, mesh: DeviceMesh, before: Placements) -> None:
    """Gather the tokens on the way in, once for all matrices of the module; gradients are summed there."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (_whole(args[0], mesh, before), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": _whole(kwargs["hidden_states"], mesh, before)}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _whole(tensor: Tensor, mesh: DeviceMesh, placement: Placements) -> DTensor:
    return DTensor.from_local(tensor, mesh, placement, run_check=False).redistribute(placements=WHOLE)


def _around(module: nn.Module, mesh: DeviceMesh, before: Placements, after: Placements) -> None:
    """Plain tensors outside, distributed ones inside."""
    module.register_forward_pre_hook(
        lambda _, args: (DTensor.from_local(args[0], mesh, before, run_check=False), *args[1:])
    )
    module.register_forward_hook(lambda _, __, out: out.redistribute(placements=after).to_local())


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Callable[[str], Placements]) -> None:
    for owner_name, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            split = distribute_tensor(parameter.detach(), mesh, placement(f"{owner_name}.{name}"))
            owner.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))


class _Reduce(torch.autograd.Function):
    """Forward: the sum over ranks. Backward: the identity: every rank computes the same loss from it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Use(torch.autograd.Function):
    """Forward: the identity. Backward: the sum over ranks, each of which used the number for its slice."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class ShardedLogits:
    """Logits of which every rank has a slice: statistics of distributions that are never put together."""

    def __init__(self, mesh: DeviceMesh, size: int):
        self._mesh = mesh
        self._group = mesh.get_group()
        self._size = size
        self._begin = mesh.get_local_rank() * -(-size // mesh.size())  # slices are as torch.chunk makes them

    def statistics(self, logits: Tensor, targets: Tensor, reference: Tensor | None) -> Statistics:
        """Logprob of each target, entropy, and KL from `reference` (this rank's slice of all logprobs)."""
        shifted, log_total = self._normalize(logits)
        probabilities = (shifted - _Use.apply(log_total, self._group)[:, None]).exp()
        index = targets - self._begin
        here = (index >= 0) & (index < logits.shape[-1])
        picked = shifted.gather(-1, index.clamp(0, logits.shape[-1] - 1)[:, None]).squeeze(-1)
        chosen = self._sum(torch.where(here, picked, 0.0)) - log_total
        entropy = log_total - self._sum((probabilities * shifted).sum(-1))
        if reference is None:
            return chosen, entropy, None
        return chosen, entropy, self._sum((probabilities * (shifted - reference)).sum(-1)) - log_total

    def logprobs(self, logits: Tensor) -> Tensor:
        """The rank's slice of all logprobs."""
        shifted, log_total = self._normalize(logits)
        return shifted - _Use.apply(log_total, self._group)[:, None]

    def width(self, logits: Tensor) -> int:
        return -(-self._size // self._mesh.size())

    def gather(self, logits: Tensor) -> Tensor:
        """All logits, on every rank."""
        shape = torch.Size((*logits.shape[:-1], self._size))
        layout: Any = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
        sharded = DTensor.from_local(logits.contiguous(), self._mesh, LAST, run_check=False, **layout)
        return sharded.full_tensor()

    def _normalize(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits less their largest, and the logarithm of the sum of their exponentials."""
        is_empty = logits.shape[-1] == 0
        largest = logits.new_full(logits.shape[:-1], -torch.inf) if is_empty else logits.detach().amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        shifted = logits - largest[:, None]
        return shifted, self._sum(shifted.exp().sum(-1)).log()

    def _sum(self, tensor: Tensor) -> Tensor:
        return _Reduce.apply(tensor, self._group)  # type: ignore[return-value]
