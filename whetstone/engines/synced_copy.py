"""An engine that samples from a copy of the policy, which `update_weights` refreshes.

For `async_rollouts`, so that the policy can train meanwhile, and for a policy that is sharded over ranks.
"""

from collections.abc import Callable

import torch

from whetstone.engines.base import Engine, EngineWrapper
from whetstone.model.policy import Policy


class SyncedCopyEngine(EngineWrapper):
    def __init__(self, engine: Engine, refresh: Callable[[], None]):
        """`engine` samples from a copy, `refresh` copies the policy's weights to it."""
        super().__init__(engine)
        self.refresh = refresh

    def update_weights(self, policy_version: int) -> None:
        self.refresh()
        super().update_weights(policy_version)


def copy_weights(policy: Policy, copy: Policy) -> Callable[[], None]:
    """A function that copies the trained weights; with LoRA those of the adapter, which alone change."""

    @torch.no_grad()
    def refresh() -> None:
        for weight, newest in zip(copy.parameters(), policy.parameters(), strict=True):
            weight.copy_(newest)

    return refresh
