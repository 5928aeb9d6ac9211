"""Prompts, and the completions of an engine in order."""

import torch

from whetstone.engines.base import Request, SamplingParams
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
