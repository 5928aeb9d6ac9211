"""The reference policy of the KL penalty: the initial weights, or an EMA of the policy.

No second module: a copy of the trainable weights is swapped in for forward passes. With LoRA it is the
adapter, or nothing where the run began from the base model: then the adapter is disabled. Each rank swaps its
own shards. With `offload` the copy is in host memory.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from whetstone.model.policy import Policy
from whetstone.model.rounding import stochastic_round
from whetstone.parallel.fsdp import like, local

CHUNK = 2**23  # values swapped at once: the extra memory on the device


class Reference:
    def __init__(self, policy: Policy, weights: list[Tensor] | None):
        self._policy = policy
        self.weights = weights  # of policy.parameters(); None: the model without its adapter

    @classmethod
    def from_policy(
        cls,
        policy: Policy,
        first: Policy,
        *,
        moving: bool,
        had_adapter: bool = False,
        offload: bool = False,
    ) -> "Reference":
        """The reference of `policy` with the weights of `first`, which is `policy` at the start of a run;
        `had_adapter`: which began from an adapter, not from a new one.
        """
        if policy.is_lora and not moving and not had_adapter:
            return cls(policy, None)
        copy = to_host if offload else torch.clone
        return cls(policy, [copy(local(parameter.detach())) for parameter in first.parameters()])

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the policy has the weights of the reference."""
        if self.weights is None:
            with self._policy.modes.without_adapter():
                yield
            return
        self._swap(self.weights)
        try:
            yield
        finally:
            self._swap(self.weights)

    @torch.no_grad()
    def ema_update(self, alpha: float, *, seed: int) -> None:
        """alpha x policy + (1 - alpha) x reference. In bf16 it is rounded stochastically, by `seed`: to the
        nearest, what differs by few steps of the grid would never move.
        """
        assert self.weights is not None, "a reference without weights of its own can't move"
        for weight, parameter in zip(self.weights, self._policy.parameters(), strict=True):
            for mine, its in pieces(weight, local(parameter)):
                mixed = mine.to(its.device, torch.promote_types(mine.dtype, torch.float32))
                mixed = mixed.lerp(its.to(mixed.dtype), alpha)
                mine.copy_(stochastic_round(mixed, mine.dtype, seed))

    def state(self) -> dict[str, Tensor]:
        assert self.weights is not None
        pairs = zip(self._policy.parameters(), self.weights, strict=True)
        return {str(i): like(parameter, weight) for i, (parameter, weight) in enumerate(pairs)}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        assert self.weights is not None
        for i, weight in enumerate(self.weights):
            weight.copy_(local(state[str(i)]))

    @torch.no_grad()
    def _swap(self, weights: list[Tensor]) -> None:
        for number, parameter in enumerate(self._policy.parameters()):
            part, weight = local(parameter), weights[number]
            if self._policy.sharding is None and weight.device == part.device:
                parameter.data, weights[number] = weight, parameter.data
            else:  # FSDP gathers from this very memory: change what it holds
                swap_(part, weight)
        if self._policy.device.type == "cuda" and any(weight.device.type == "cpu" for weight in weights):
            torch.cuda.current_stream(self._policy.device).synchronize()  # before the host reads its part


def to_host(weight: Tensor) -> Tensor:
    """A copy in the memory of the host, pinned where the weight is on a GPU."""
    host = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.device.type == "cuda")
    return host.copy_(weight)


@torch.no_grad()
def swap_(first: Tensor, second: Tensor) -> None:
    """Swap the values of two tensors on any devices, through a small buffer on the device of `first`."""
    for here, there in pieces(first, second):
        saved = here.clone()
        here.copy_(there, non_blocking=True)
        there.copy_(saved, non_blocking=True)  # behind the copy before it, on the same stream


def pieces(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the same parts of two tensors of one shape, at most `CHUNK` values each (whole rows)."""
    if first.dim() == 0 or first.numel() == 0:
        yield first, second
        return
    rows = max(1, CHUNK * len(first) // first.numel())
    yield from zip(first.split(rows), second.split(rows), strict=True)
