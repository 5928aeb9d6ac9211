"""The value model of the actor-critic: what the rest of an answer will earn, before each of its tokens.

`head`: one linear layer on the policy's own hidden states, which it helps to shape. `model`: a trunk of its
own, begun as a copy of the policy's. Both give one number per completion token of a packed batch; they know
nothing of rewards.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from whetstone.model.attention import PackedAttention, take
from whetstone.model.policy import Policy


class Critic:
    def __init__(self, policy: Policy, kind: str):
        size = policy.config.hidden_size
        self.head = nn.Linear(size, 1, device=policy.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)  # it expects nothing at first
        nn.init.zeros_(self.head.bias)
        self.trunk: Any = None
        if kind == "model":
            self.trunk = copy.deepcopy(policy.trunk).requires_grad_(True)

    @property
    def parameters(self) -> list[nn.Parameter]:
        trunk = [] if self.trunk is None else [p for p in self.trunk.parameters() if p.requires_grad]
        return [*self.head.parameters(), *trunk]

    def values(self, batch: Any, policy_rows: Tensor) -> Tensor:
        """[N] values; `policy_rows` are the policy's hidden states [N, H] that predict each token."""
        rows = policy_rows
        if self.trunk is not None:
            hidden = self.trunk(
                input_ids=batch.token_ids[None],
                position_ids=batch.position_ids[None],
                attend=PackedAttention(batch.segments, batch.token_ids.device),
                use_cache=False,
            ).last_hidden_state[0]
            rows = take(hidden, batch.rows)
        return self.head(rows.float()).squeeze(-1)

    def state(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.parameters]

    @torch.no_grad()
    def load_state(self, state: list[Tensor]) -> None:
        for parameter, saved in zip(self.parameters, state, strict=True):
            parameter.copy_(saved)
