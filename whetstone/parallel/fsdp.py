"""FSDP2: weights, gradients and optimizer state sharded over the ranks, gathered layer by layer.

`Root` is the module whose call gathers what is outside the layers (embedding, last norm, output head). The
shards are float32 and serve as the master weights. Layers are gathered in the compute dtype; gradients
are summed, not averaged, in float32. `local` and `like` convert between a parameter and this rank's shard.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from whetstone.parallel.mesh import Ranks


class Root(nn.Module):
    """Runs any work as its own forward pass, around which FSDP gathers the weights that the work may use."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, work: Callable[..., Any], *tensors: Tensor) -> Any:
        return work(*tensors)


def shard(
    root: nn.Module, layers: Iterable[nn.Module], ranks: Ranks, *, compute: torch.dtype, offload: bool
) -> None:
    """Shard the layers one by one, and the rest of `root` together."""
    precision = MixedPrecisionPolicy()
    if compute != torch.float32:
        precision = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    # Reshard the root too: weights that stayed gathered would be stale after a swap with the reference.
    options: Any = {"mesh": ranks.sharding, "mp_policy": precision, "reshard_after_forward": True}
    for module in (*layers, root):
        fully_shard(module, offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(), **options)
    for module in sharded_modules(root):
        module.set_gradient_divide_factor(1.0)  # losses are normalized by global counts already
        module.set_force_sum_reduction_for_comms(True)


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def hide_fsdp_from_dynamo(layer: nn.Module) -> None:
    """Let torch's compiler take a sharded layer for an ordinary one; FSDP's hooks run outside of it anyway.

    Otherwise it takes every number in the module (heads, sizes) for one that may vary, as lengths do: larger
    graphs, slower kernels, several times the time to compile.
    """
    for module in layer.modules() if isinstance(layer, FSDPModule) else ():
        module._is_fsdp_managed_module = False  # type: ignore[assignment]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient: a view; a plain tensor is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """This rank's `part` as a tensor that is spread as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor(part, parameter._spec, requires_grad=False)  # type: ignore[call-arg]


def norm_weight(parameter: Tensor, ranks: Ranks) -> float:
    """The weight of one rank's part in a sum over all ranks, such that repeated parts count once."""
    parts = 1
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            parts *= 1 if placement.is_replicate() else parameter.device_mesh.size(axis)
    return parts / ranks.world_size


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill_from_main(target: nn.Module, source: nn.Module | None, device: torch.device) -> None:
    """Copy weights and buffers of `source`, which only the first rank has, into the shards of `target`."""
    tensors = {} if source is None else dict([*source.named_parameters(), *source.named_buffers()])
    for name, tensor in (*target.named_parameters(), *target.named_buffers()):
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if source is not None:
            whole.copy_(tensors[name])
        dist.broadcast(whole, src=0)
        copy_into(tensor, whole)


@torch.no_grad()
def copy_into(tensor: Tensor, whole: Tensor) -> None:
    """This rank's part of `whole` into a tensor that may be sharded."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(whole)
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    for axis, (begin, length) in enumerate(zip(offset, shape, strict=True)):
        whole = whole.narrow(axis, min(begin, whole.shape[axis]), length)
    tensor.to_local().copy_(whole)


@torch.no_grad()
def copy_gathered(root: nn.Module, source: nn.Module, target: nn.Module, *, trained_only: bool) -> None:
    """Copy the weights of `source` (inside `root`) into the same model without FSDP, a layer at a time."""
    into = dict(target.named_parameters(remove_duplicate=False))
    modules = {module: name for name, module in source.named_modules(remove_duplicate=False)}
    for group in sharded_modules(root):
        mine = [*_own_parameters(group, modules)]
        if trained_only and not any(into[name].requires_grad for name, _ in mine):
            continue
        group.unshard()
        for name, owner in mine:
            if into[name].requires_grad or not trained_only:
                local(into[name]).copy_(local(owner.get_parameter(name.rpartition(".")[2])))
        group.reshard()


def _own_parameters(group: Any, names: dict[nn.Module, str]) -> Iterator[tuple[str, nn.Module]]:
    """Names and owners of the parameters that a sharded module gathers itself, not through one below it."""

    def visit(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in names:
            for name, _ in module.named_parameters(recurse=False):
                yield f"{names[module]}.{name}".lstrip("."), module
        for child in module.children():
            if not isinstance(child, FSDPModule):
                yield from visit(child)

    yield from visit(group)


def materialize(root: nn.Module, device: torch.device, *, offload: bool = False) -> None:
    """Give a model without weights its memory (not its values); weights that are shared stay so."""
    parameters: dict[int, nn.Parameter] = {}
    home = torch.device("cpu") if offload else device
    for module in root.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in parameters:
                empty = torch.empty_like(parameter.detach(), device=home)
                parameters[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module.register_parameter(name, parameters[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    for group in sharded_modules(root):  # FSDP takes the new memory over when it is first used
        group.unshard()
        group.reshard()
