"""The policy that the KL penalty compares with: the first weights, or weights that follow the policy.

No second module: the reference is a copy of the weights that train (with LoRA of the adapter alone, or of
nothing where the reference is the base model: then the adapter is switched off), swapped in for its forward
pass. Where weights are sharded, every rank keeps and swaps its own part.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from whetstone.model.policy import Policy
from whetstone.parallel.fsdp import like, local


class Reference:
    def __init__(self, policy: Policy, weights: list[Tensor] | None):
        self._policy = policy
        self.weights = weights  # of policy.parameters, in their order; None: the model without its adapter

    @classmethod
    def of(cls, policy: Policy, first: Policy, *, moving: bool) -> "Reference":
        """The reference of `policy` with the weights of `first`: the policy itself where a run begins."""
        if policy.is_lora and not moving:
            return cls(policy, None)
        return cls(policy, [local(parameter.detach()).clone() for parameter in first.parameters])

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the policy computes what the reference would."""
        if self.weights is None:
            with self._policy.model.disable_adapter():
                yield
            return
        self._swap(self.weights)
        try:
            yield
        finally:
            self._swap(self.weights)

    @torch.no_grad()
    def follow(self, share: float) -> None:
        """Move towards the policy: share x policy + (1 - share) x reference."""
        assert self.weights is not None, "a reference without weights of its own can't move"
        for weight, parameter in zip(self.weights, self._policy.parameters, strict=True):
            weight.lerp_(local(parameter), share)

    def state(self) -> dict[str, Tensor]:
        assert self.weights is not None
        pairs = zip(self._policy.parameters, self.weights, strict=True)
        return {str(i): like(parameter, weight) for i, (parameter, weight) in enumerate(pairs)}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        assert self.weights is not None
        for i, weight in enumerate(self.weights):
            weight.copy_(local(state[str(i)]))

    @torch.no_grad()
    def _swap(self, weights: list[Tensor]) -> None:
        if self._policy.spread is None:
            for number, parameter in enumerate(self._policy.parameters):
                parameter.data, weights[number] = weights[number], parameter.data
            return
        for weight, parameter in zip(weights, self._policy.parameters, strict=True):
            part = local(parameter)  # FSDP gathers from this very memory: change what it holds
            kept = part.clone()
            part.copy_(weight)
            weight.copy_(kept)
