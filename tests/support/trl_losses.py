"""The same batch through TRL's own `_compute_loss` and through our update: values and gradients of both."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from whetstone.algorithm.losses import ratio_level
from whetstone.config import build, make_plan
from whetstone.model.policy import Policy
from whetstone.update.experience import Experience
from whetstone.update.packing import Sample, pack
from whetstone.update.updater import Updater

Gradient = dict[str, torch.Tensor]


def reference_of(old: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Reference logprobs as a function of what both sides know."""
    return old + 0.3 * torch.sin(tokens.float())


@torch.no_grad()
def old_logprobs(policy: Policy, prompt, tokens, generator: torch.Generator) -> torch.Tensor:
    """The policy's own logprobs, pushed about so that ratios lie between 0.5 and 2."""
    policy.set_attention("sdpa")
    logits = policy.lm(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    policy.set_attention("whetstone")
    own = logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]
    return own + (torch.rand(len(tokens), generator=generator) - 0.5) * 2 * math.log(2)


def theirs(
    trainer: Any, inputs: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> tuple[float, Gradient]:
    """TRL's loss of its own `inputs`."""
    config = build(dict(settings)).loss
    trainer.loss_type = "grpo" if config.loss_type == "gspo" else config.loss_type
    trainer.importance_sampling_level = ratio_level(config)
    trainer.epsilon_low, trainer.epsilon_high = config.epsilon, config.upper_epsilon
    trainer.beta = config.beta
    trainer.off_policy_mask_threshold = config.off_policy_mask_threshold
    trainer.top_entropy_quantile = config.top_entropy_quantile
    trainer.entropy_coef, trainer._entropy_bonus_enabled = config.entropy_coef, config.entropy_coef != 0
    trainer.args.delta = config.delta
    trainer.args.use_bias_correction_kl = config.use_bias_correction_kl
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}


def ours(
    policy: Policy, samples: list[Sample], settings: Mapping[str, Any], max_length: int
) -> tuple[float, Gradient]:
    """Our loss; the reward of a sample is its advantage."""
    config = build({**settings, "max_steps": 1, "max_completion_length": max_length, "learning_rate": 0.0})
    updater = Updater(policy, config, make_plan(config, num_problems=10), None)
    part = [
        Experience(
            batch=batch,
            advantages=batch.rewards[batch.sequence_ids, 0],
            old_logprobs=batch.sampler_logprobs,
            reference_logprobs=reference_of(batch.sampler_logprobs, batch.targets)
            if config.loss.beta
            else None,
            values=None,
            returns=None,
        )
        for batch in pack(samples, 1 << 20)
    ]
    policy.model.train()
    policy.model.zero_grad()
    loss, _ = updater.gradient(part)
    return loss.item(), {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}


def relative_difference(gradient: Gradient, expected: Gradient) -> float:
    """The norm of the difference by that of the expected gradient, which is not 0."""
    assert gradient.keys() == expected.keys()
    difference = torch.cat([(gradient[name] - expected[name]).flatten() for name in expected])
    total = torch.cat([part.flatten() for part in expected.values()])
    assert total.norm() > 1e-3  # there is something to compare
    return float(difference.norm() / total.norm())
