"""Prompts, the completions of an engine in order, and requests that come and leave."""

import torch

from whetstone.engines.base import PartialOutput, Request, SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.model.attention import PackedAttention, packed_segments

PROMPTS = [(5, 9, 33, 8), (7, 3, 41, 60, 61, 62, 13, 20, 21, 22, 23), (11,)]


def collect(engine, requests, sampling):
    return {(one.request, one.sample): one.completion for one in engine.generate(requests, sampling)}


def trainer_logprobs(policy, prompt, completion, temperature=1.0):
    ids = torch.tensor([*prompt, *completion.token_ids])
    hidden = policy.hidden(
        ids[None], torch.arange(len(ids))[None], PackedAttention(packed_segments([len(ids)]), policy.device)
    )
    logprobs = (policy.head(hidden[0]) / temperature).log_softmax(-1)
    rows = torch.arange(len(prompt) - 1, len(ids) - 1)
    return logprobs[rows, torch.tensor(completion.token_ids)]


def compare_with_trainer(engine, policy):
    """Logprobs of sampled tokens are those of the trainer's forward pass."""
    requests = [Request(prompt_ids=prompt, seeds=(1, 2)) for prompt in PROMPTS]
    for (number, _), completion in collect(engine, requests, SamplingParams(max_tokens=12)).items():
        expected = trainer_logprobs(policy, PROMPTS[number], completion)
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)


class Visitors:
    """Requests that come one after the other while others are sampled; `leave` after so many calls."""

    max_prompt_length, num_sequences = 16, 3
    max_length: int | None = 40

    def __init__(self, requests, leave):
        self.requests, self.leave, self.calls = list(requests), leave, 0

    def take(self, *, wait):
        self.calls += 1
        return [self.requests.pop(0)] if self.requests and (wait or self.calls % 2) else []

    def cancelled(self):
        return self.leave.pop(self.calls, ())


def come_and_leave(policy):
    """Samples of requests that come while others are sampled are those of each alone; some are cancelled."""
    params = [
        SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=14, temperature=1.4, top_p=0.8, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.6, top_k=5, ignore_eos=True),
    ]
    requests = [
        Request(prompt_ids=prompt, seeds=(number, number + 9), sampling=own)
        for number, (prompt, own) in enumerate(zip(PROMPTS, params, strict=True))
    ]
    visitors = Visitors(requests, {4: [(1, 0)], 6: [(2, 1), (7, 7)]})
    finished = {}
    for output in NativeEngine(policy, 3).stream([], SamplingParams(max_tokens=24), visitors):
        if not isinstance(output, PartialOutput):
            finished[output.request, output.sample] = output.completion
        else:
            assert (output.request, output.sample) not in finished
    assert set(finished) == {(0, 0), (0, 1), (1, 1), (2, 0)}
    for (number, index), completion in finished.items():
        request = Request(prompt_ids=PROMPTS[number], seeds=requests[number].seeds)
        alone = collect(NativeEngine(policy, 1), [request], params[number])
        assert completion.token_ids == alone[0, index].token_ids
