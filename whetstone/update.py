"""Packed batches -> optimiser steps.

One call of `Updater.step` uses one batch of rollouts: `num_iterations` times over its `minibatches` parts, an
optimiser step each, every step accumulated over packed micro-batches. Knows losses, the policy and its
optimiser; nothing of problems or engines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from whetstone.algorithm.losses import LossInputs, policy_loss
from whetstone.algorithm.masks import high_entropy, off_policy_keep, sampler_weights, sequence_mean
from whetstone.algorithm.reduce import token_weights
from whetstone.batch import Batch
from whetstone.config import Config, Plan
from whetstone.errors import UserError
from whetstone.model.policy import Policy
from whetstone.optimiser import Optimiser

Minibatch = Sequence[Batch]  # the micro-batches of one optimiser step


class Updater:
    """Owns the optimiser and, where beta asks for it, the frozen reference."""

    def __init__(self, policy: Policy, config: Config, plan: Plan, reference: nn.Module | None):
        self.policy = policy
        self.config = config
        self.optimiser = Optimiser(
            policy.parameters, config.update, num_steps=plan.num_steps, warmup_steps=plan.warmup_steps
        )
        self.frozen = reference  # None without beta, and with LoRA, whose base weights are the reference
        self.skipped_in_a_row = 0

    def step(self, minibatches: Sequence[Minibatch], seed: int) -> dict[str, float]:
        """All optimiser steps of one batch of rollouts; the metrics are token means over them.

        `seed` fixes what is random in the forward pass (LoRA dropout), so that a resumed run repeats it.
        """
        torch.manual_seed(seed)
        self.policy.model.train()
        minibatches = [[batch.to(self.policy.device) for batch in part] for part in minibatches]
        reference = [[self._reference(batch) for batch in part] for part in minibatches]
        # With several parts the later ones meet a policy that has moved: their old logprobs must be taken
        # before. With one part, the first iteration is on-policy by construction and leaves its logprobs for
        # the others: no extra pass.
        old: list[list[Tensor | None]] = [[None] * len(part) for part in minibatches]
        if len(minibatches) > 1:
            old = [[self._logprobs_now(batch) for batch in part] for part in minibatches]
        totals = Totals()
        for _ in range(self.config.update.num_iterations):
            for part, part_old, part_reference in zip(minibatches, old, reference, strict=True):
                self._optimiser_step(part, part_old, part_reference, totals)
        return totals.means()

    def _optimiser_step(
        self, part: Minibatch, old: list[Tensor | None], reference: list[Tensor | None], totals: "Totals"
    ) -> None:
        counts = self._count(part)
        loss = 0.0
        for index, batch in enumerate(part):
            value, old[index] = self._backward(
                batch, counts.weights[index], counts, old[index], reference[index], totals
            )
            loss += value
        norm = self.optimiser.gradient_norm()
        totals.add_step(loss=loss, grad_norm=norm, learning_rate=self.optimiser.learning_rate)
        if math.isfinite(loss) and math.isfinite(norm):
            self.optimiser.step(norm)
            self.skipped_in_a_row = 0
        else:
            self._skip(loss, norm, totals)
        self.optimiser.finish()

    def _backward(
        self,
        batch: Batch,
        weights_S: Tensor,
        counts: "Counts",
        old: Tensor | None,
        reference: Tensor | None,
        totals: "Totals",
    ) -> tuple[float, Tensor]:
        """Accumulate the gradient of one micro-batch; returns its loss and its old logprobs."""
        config = self.config.loss
        logprobs, entropy = self.policy.logprobs(batch, self.config.rollout.temperature)
        old = logprobs.detach() if old is None else old
        factors = self._factors(batch, logprobs.detach(), old, entropy.detach(), counts)
        outputs = policy_loss(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=old,
                advantages=batch.advantages,
                sequence=batch.sequence,
                num_sequences=batch.num_sequences,
                reference_logprobs=reference,
                factor=math.prod(factors.values()) if factors else None,  # type: ignore[arg-type]
            ),
            config,
        )
        loss = (outputs.loss * weights_S[batch.sequence]).sum()
        if config.entropy_coef:
            # A mean over the tokens it acts on, whatever the loss type makes of lengths (as in TRL).
            acts_on = batch.keep[batch.sequence] * factors.get("high_entropy", 1.0)
            loss = loss - config.entropy_coef * (entropy * acts_on).sum() / counts.entropy_tokens
        loss.backward()
        totals.add_tokens(
            len(batch.targets),
            entropy=entropy.detach(),
            clip_share=outputs.clipped,
            kl=outputs.kl,
            sampler_logprob_difference=(batch.sampler_logprobs - old).abs(),
            truncated_masked_share=1 - batch.keep[batch.sequence],
            **{f"{name}_removed_share": (factor == 0).float() for name, factor in factors.items()},
        )
        return loss.item(), old

    def _factors(
        self, batch: Batch, logprobs: Tensor, old: Tensor, entropy: Tensor, counts: "Counts"
    ) -> dict[str, Tensor]:
        """What each mechanism leaves of every token's policy loss, by its name."""
        config = self.config.loss
        factors: dict[str, Tensor] = {}
        if config.off_policy_mask_threshold is not None:
            drift = sequence_mean(batch.sampler_logprobs - logprobs, batch.sequence, batch.num_sequences)
            advantages = sequence_mean(batch.advantages, batch.sequence, batch.num_sequences)
            keep = off_policy_keep(
                advantages, drift, config.off_policy_mask_threshold, config.off_policy_mask
            )
            factors["off_policy"] = keep[batch.sequence]
        if config.sampler_correction != "none":
            factors["sampler"] = sampler_weights(
                old - batch.sampler_logprobs, batch.sequence, batch.num_sequences, config
            )
        if counts.entropy_threshold is not None:
            factors["high_entropy"] = high_entropy(entropy, counts.entropy_threshold)
        return factors

    def _count(self, part: Minibatch) -> "Counts":
        """Everything that is counted over the whole optimiser step before any backward pass."""
        lengths = [torch.bincount(batch.sequence, minlength=batch.num_sequences) for batch in part]
        keep = torch.cat([batch.keep for batch in part])
        weights = token_weights(
            torch.cat(lengths),
            keep,
            loss_type=self.config.loss.loss_type,
            max_length=self.config.rollout.max_completion_length,
        )
        tokens, threshold = float((torch.cat(lengths) * keep).sum()), None
        if self.config.loss.top_entropy_quantile < 1:
            # One more pass without gradients: the quantile is that of the step, not of a micro-batch.
            entropy = torch.cat([self._entropy_now(batch)[batch.keep[batch.sequence] > 0] for batch in part])
            threshold = torch.quantile(entropy, 1 - self.config.loss.top_entropy_quantile)
            tokens = float((entropy >= threshold).sum())
        split = list(weights.split([batch.num_sequences for batch in part]))
        return Counts(weights=split, entropy_tokens=max(1.0, tokens), entropy_threshold=threshold)

    @torch.no_grad()
    def _entropy_now(self, batch: Batch) -> Tensor:
        return self.policy.logprobs(batch, self.config.rollout.temperature)[1]

    @torch.no_grad()
    def _logprobs_now(self, batch: Batch) -> Tensor:
        return self.policy.logprobs(batch, self.config.rollout.temperature)[0]

    @torch.no_grad()
    def _reference(self, batch: Batch) -> Tensor | None:
        if self.config.loss.beta == 0:
            return None
        with self.policy.reference(self.frozen) as reference:
            return reference.logprobs(batch, self.config.rollout.temperature)[0]

    def _skip(self, loss: float, norm: float, totals: "Totals") -> None:
        totals.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.config.update.max_skipped_steps:
            raise UserError(
                f"{self.skipped_in_a_row} steps in a row had a loss ({loss}) or gradient norm ({norm}) that "
                "is not finite, and were skipped: "
                "lower learning_rate, or go back to an earlier checkpoint with resume_from_checkpoint."
            )


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a whole optimiser step adds up to, so that its gradient does not depend on micro-batches."""

    weights: list[Tensor]  # for each micro-batch, [S]: what a token of each completion weighs
    entropy_tokens: float  # that the entropy bonus is averaged over
    entropy_threshold: Tensor | None  # None: tokens of any entropy are learnt from


class Totals:
    """Sums over tokens and over optimiser steps, kept on the device until the end."""

    def __init__(self) -> None:
        self.tokens = 0
        self.sums: dict[str, Tensor] = {}
        self.steps: list[dict[str, float]] = []
        self.skipped = 0

    def add_tokens(self, count: int, **values: Tensor | None) -> None:
        self.tokens += count
        for name, value in values.items():
            if value is not None:
                self.sums[name] = self.sums.get(name, torch.zeros((), device=value.device)) + value.sum()

    def add_step(self, **values: float) -> None:
        self.steps.append(values)

    def means(self) -> dict[str, float]:
        row = {name: sum(step[name] for step in self.steps) / len(self.steps) for name in self.steps[0]}
        row.update({name: total.item() / max(1, self.tokens) for name, total in self.sums.items()})
        return {**row, "skipped_steps": float(self.skipped)}
