"""An engine of this process that samples from a copy of the policy, so that the policy may train meanwhile.

Wraps any engine that works on a policy's modules in place. The copy takes over the policy's weights at
`update_weights`, and only then: with LoRA those of the adapter, which are all that ever change.
"""

from collections.abc import Iterator

import torch

from whetstone.engines.base import Engine, GenerationOutput, Request, SamplingParams
from whetstone.model.policy import Policy


class Apart:
    def __init__(self, engine: Engine, policy: Policy, own: Policy):
        """`engine` works on `own`, a copy of `policy`."""
        self.engine = engine
        self.policy = policy
        self.own = own

    def generate(self, requests: list[Request], sampling: SamplingParams) -> Iterator[GenerationOutput]:
        return self.engine.generate(requests, sampling)

    @torch.no_grad()
    def update_weights(self, policy_version: int) -> None:
        for weight, newest in zip(self.own.parameters, self.policy.parameters, strict=True):
            weight.copy_(newest)
        self.engine.update_weights(policy_version)

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def close(self) -> None:
        self.engine.close()
