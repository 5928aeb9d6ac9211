"""Rollouts of several turns, of environments or of agents: their tokens and logprobs."""

import torch

from whetstone.config import Config
from whetstone.model.policy import Policy
from whetstone.types import Finish, Group, Rollout
from whetstone.update.packing import make_samples, pack


def rollouts_of(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def all_ids(rollout: Rollout) -> list[int]:
    ids = [*rollout.prompt_ids]
    for turn in rollout.turns:
        ids += [*turn.completion.token_ids, *turn.observation_ids]
    return ids


def check_tokens(policy: Policy, groups: list[Group]) -> None:
    """The template writes the conversation with exactly these tokens."""
    for group in groups:
        for rollout in group.rollouts:
            if rollout.completion.finish is Finish.LENGTH:
                continue
            assert rollout.episode is not None
            messages = [*group.problem.messages, *rollout.episode.messages]
            if messages[-1]["role"] == "user":  # the environment's last word, which the policy does not see
                messages.pop()
            text = policy.tokenizer.apply_chat_template(messages, tokenize=False)
            assert policy.tokenizer.decode(all_ids(rollout)) == text


def check_logprobs(policy: Policy, groups: list[Group], config: Config) -> None:
    """Those of the trainer, of exactly the tokens that were sampled."""
    [batch] = pack(make_samples(groups, config), 1 << 20)
    with torch.no_grad():
        logprobs = policy.logprobs(batch, 1.0)
    assert (logprobs - batch.sampler_logprobs).abs().max() < 1e-4
    sampled = [token for rollout in rollouts_of(groups) for token in rollout.completion.token_ids]
    assert sorted(batch.targets.tolist()) == sorted(sampled)
