"""Conversations of several turns with the native engine."""

import torch

from tests.support.engines import PROMPTS
from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.native import NativeEngine

SAMPLING = SamplingParams(max_tokens=45, ignore_eos=True)
HEARD = tuple(range(30, 49))
NUM_TURNS = 4


class Conversations:
    """The next turn of each sample as soon as the one before has ended, up to `NUM_TURNS`."""

    max_prompt_length, num_sequences = 400, 6
    max_length: int | None = None

    def __init__(self) -> None:
        self.requests = [Request(prompt_ids=prompt, seeds=(1, 2), may_continue=True) for prompt in PROMPTS]
        self.turns = dict.fromkeys(range(len(PROMPTS)), 1)  # by request
        self.ready: list[Request] = []
        self.num_open = 2 * len(PROMPTS)
        self.ended: list[tuple[int, int]] = []

    def take(self, *, wait: bool) -> list[Request]:
        ready, self.ready = self.ready, []
        for request in ready:
            assert request.continues is not None
            self.turns[len(self.requests)] = self.turns[request.continues[0]] + 1
            self.requests.append(request)
        return ready

    def cancelled(self) -> list[tuple[int, int]]:
        ended, self.ended = self.ended, []
        return ended

    def accept(self, output) -> None:
        request = self.requests[output.request]
        if self.turns[output.request] == NUM_TURNS:
            return self.ended.append((output.request, output.sample))
        self.ready.append(
            Request(
                prompt_ids=(*request.prompt_ids, *output.completion.token_ids, *HEARD),
                seeds=(request.seeds[output.sample] + 10,),
                may_continue=True,
                continues=(output.request, output.sample),
            )
        )


def converse(policy, engine=None):
    """(requests, completions by (request, sample))."""
    conversations, completions = Conversations(), {}
    engine = engine or NativeEngine(policy, 6)
    for output in engine.generate_open(list(conversations.requests), SAMPLING, conversations):
        completions[output.request, output.sample] = output.completion
        conversations.accept(output)
    assert len(completions) == 2 * len(PROMPTS) * NUM_TURNS
    return conversations.requests, completions


def new_weights_between_calls(policy):
    """Later turns after an update are those of an engine that never had the old weights."""
    engine = NativeEngine(policy, 6)
    before = by_prompt(*converse(policy, engine))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    engine.update_weights(1)
    after = by_prompt(*converse(policy, engine))
    fresh = by_prompt(*converse(policy, NativeEngine(policy, 6)))
    assert after.keys() == fresh.keys() != before.keys()  # prompts hold what was said before
    for key, completion in after.items():
        assert completion.token_ids == fresh[key].token_ids
        assert torch.allclose(torch.tensor(completion.logprobs), torch.tensor(fresh[key].logprobs), atol=1e-3)


def by_prompt(requests, completions):
    """Completions by the prompt and the seed."""
    return {
        (requests[number].prompt_ids, requests[number].seeds[sample]): completion
        for (number, sample), completion in completions.items()
    }
