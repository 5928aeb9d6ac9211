"""The value model of the actor-critic: the expected return before each completion token."""

from typing import Any

import torch
from torch import Tensor, nn

from whetstone.model.policy import Policy
from whetstone.model.sharded import shard_alone, trunk_copy
from whetstone.model.size import layers_of
from whetstone.parallel.fsdp import Root


class Critic:
    def __init__(self, policy: Policy, kind: str):
        self.policy = policy
        head = nn.Linear(policy.config.hidden_size, 1, device=policy.device, dtype=torch.float32)
        nn.init.zeros_(head.weight)  # initial values are 0
        nn.init.zeros_(head.bias)
        self.head = shard_alone(policy, head)
        self.trunk: Any = None
        if kind == "model":
            self.trunk, shard = trunk_copy(policy)
            self.root = shard(Root(self.trunk))

    def parameters(self) -> list[nn.Parameter]:
        trunk = [] if self.trunk is None else [p for p in self.trunk.parameters() if p.requires_grad]
        return [*self.head.parameters(), *trunk]

    def values(self, batch: Any, policy_hidden: Tensor) -> Tensor:
        """[N] values; `policy_hidden` are the policy's hidden states [N, H] that predict each token.

        The layers of a trunk are checkpointed where the policy's are.
        """
        hidden = policy_hidden
        if self.trunk is not None:
            for layer, other in zip(layers_of(self.trunk), self.policy.layers, strict=True):
                for key in ("training", "gradient_checkpointing", "_gradient_checkpointing_func"):
                    if key in vars(other):
                        setattr(layer, key, vars(other)[key])
            hidden = self.root(lambda: self.policy.completion_hidden_of(self.trunk, batch))
        return self.head(hidden.float()).squeeze(-1)
