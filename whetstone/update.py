"""Packed batches -> optimiser steps.

One call of `Updater.step` uses one batch of rollouts: `num_iterations` times over its `minibatches` parts, an
optimiser step each, every step accumulated over packed micro-batches. Knows losses, the policy and its
optimiser; nothing of problems or engines.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from whetstone.algorithm.losses import LossInputs, policy_loss
from whetstone.algorithm.masks import off_policy_keep, sequence_mean
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
        weights = self._weights(part)
        loss = 0.0
        for index, batch in enumerate(part):
            value, old[index] = self._backward(batch, weights[index], old[index], reference[index], totals)
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
        self, batch: Batch, weights_S: Tensor, old: Tensor | None, reference: Tensor | None, totals: "Totals"
    ) -> tuple[float, Tensor]:
        """Accumulate the gradient of one micro-batch; returns its loss and its old logprobs."""
        config = self.config.loss
        logprobs, entropy = self.policy.logprobs(batch, self.config.rollout.temperature)
        old = logprobs.detach() if old is None else old
        keep = None
        if config.off_policy_mask_threshold is not None:
            drift_S = sequence_mean(
                batch.sampler_logprobs - logprobs.detach(), batch.sequence, batch.num_sequences
            )
            advantage_S = sequence_mean(batch.advantages, batch.sequence, batch.num_sequences)
            keep = off_policy_keep(advantage_S, drift_S, config.off_policy_mask_threshold)[batch.sequence]
        outputs = policy_loss(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=old,
                advantages=batch.advantages,
                entropy=entropy if config.entropy_coef else entropy.detach(),
                reference_logprobs=reference,
                keep=keep,
            ),
            config,
        )
        loss = (outputs.loss * weights_S[batch.sequence]).sum()
        loss.backward()
        difference = batch.sampler_logprobs - old
        totals.add_tokens(
            len(batch.targets),
            entropy=entropy.detach(),
            clip_share=outputs.clipped,
            kl=outputs.kl,
            sampler_logprob_difference=difference.abs(),
            off_policy_masked_share=None if keep is None else 1 - keep,
        )
        return loss.item(), old

    def _weights(self, part: Minibatch) -> list[Tensor]:
        """Per-sequence token weights of each micro-batch, counted over the whole optimiser step."""
        lengths = [torch.bincount(batch.sequence, minlength=batch.num_sequences) for batch in part]
        weights = token_weights(
            torch.cat(lengths),
            torch.cat([batch.keep for batch in part]),
            loss_type=self.config.loss.loss_type,
            max_length=self.config.rollout.max_completion_length,
        )
        return list(weights.split([batch.num_sequences for batch in part]))

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
