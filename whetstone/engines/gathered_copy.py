"""An engine in this process that samples from a copy of a policy whose weights are spread over ranks.

`update_weights` gathers the copy anew, a layer at a time; everything else is the engine's own. Where ranks
split layers among them (tensor parallel), they decode the same tokens in step. No copy is made for a policy
that is whole.
"""

from collections.abc import Callable, Iterator

from whetstone.engines.base import Engine, GenerationOutput, Request, SamplingParams
from whetstone.model.policy import Policy
from whetstone.model.sharded import sampling_copy


class GatheredEngine:
    def __init__(self, policy: Policy, make: Callable[[Policy], Engine]):
        copy, self._refresh = sampling_copy(policy)
        self._engine = make(copy)

    def generate(self, requests: list[Request], sampling: SamplingParams) -> Iterator[GenerationOutput]:
        return self._engine.generate(requests, sampling)

    def update_weights(self, policy_version: int) -> None:
        self._refresh()
        self._engine.update_weights(policy_version)

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def close(self) -> None:
        self._engine.close()
