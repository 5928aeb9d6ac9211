"""The gradient of one optimizer step: policy loss, KL, entropy bonus and value loss."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.profiler import record_function

from whetstone.algorithm.advantages import value_loss
from whetstone.algorithm.losses import LossInputs, PolicyLoss, importance_ratio, policy_loss, ratio_level
from whetstone.algorithm.masks import (
    entropy_threshold,
    high_entropy,
    off_policy_keep,
    sampler_weights,
    sequence_mean,
)
from whetstone.algorithm.reduce import token_weights
from whetstone.config import Config
from whetstone.model.critic import Critic
from whetstone.model.logprobs import TokenStatistics
from whetstone.model.memory import upload
from whetstone.model.policy import Policy
from whetstone.parallel.collectives import all_gather_data, all_reduce_data
from whetstone.parallel.mesh import Ranks
from whetstone.terminal.stages import advance
from whetstone.update.coefficients import Coefficients
from whetstone.update.experience import Experience
from whetstone.update.packing import Batch
from whetstone.update.token_table import TokenTable

PREFIX = "whet:"  # of the names of ranges


@dataclass(frozen=True, kw_only=True)
class LossNormalizers:
    """Counts over a whole optimizer step, fixed before its first backward pass."""

    token_weights: list[Tensor]  # per micro-batch, [S]: the weight of a token of each completion
    num_tokens: float  # in the loss
    num_entropy_tokens: float  # that the entropy bonus is averaged over
    entropy_threshold: Tensor | None  # None: tokens of any entropy are in the loss


class TokenMeans:
    """Means over the tokens of an optimizer step on all ranks. Sums stay on the device until `means`."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.sums: dict[str, tuple[Tensor, int]] = {}

    def add(self, num_tokens: int, **values: Tensor | None) -> None:
        for name, value in values.items():
            if value is not None:
                total, count = self.sums.get(name, (torch.zeros((), device=value.device), 0))
                self.sums[name] = (total + value.sum(), count + num_tokens)

    def means(self) -> dict[str, float]:
        table = torch.tensor([(total.item(), count) for total, count in self.sums.values()])
        table = all_reduce_data(self.ranks, table.double()).tolist()
        return {name: total / max(1, count) for name, (total, count) in zip(self.sums, table, strict=True)}


class GradientAccumulator:
    """Runs forward and backward passes; gradients stay in the parameters."""

    def __init__(self, policy: Policy, critic: Critic | None, config: Config, coefficients: Coefficients):
        self.policy = policy
        self.critic = critic
        self.config = config
        self.coefficients = coefficients
        self.ranks = policy.ranks
        self.tokens = TokenTable()

    def accumulate(
        self, minibatch: list[Experience], normalizers: LossNormalizers
    ) -> tuple[Tensor, TokenMeans]:
        """The loss of an optimizer step and the means over its tokens; `minibatch` gets old logprobs.

        The loss is on the device: reading it waits for all passes.
        """
        token_means = TokenMeans(self.ranks)
        loss = torch.zeros((), dtype=torch.float64, device=self.policy.device)
        for index, experience in enumerate(minibatch):
            if experience.batch.is_skipped:
                continue
            weights = normalizers.token_weights[index]
            value, minibatch[index] = self._backward(experience, weights, normalizers, token_means)
            loss += value
            advance()
        return all_reduce_data(self.ranks, loss), token_means

    def normalizers(self, minibatch: list[Batch]) -> LossNormalizers:
        """Counts over the whole optimizer step, on all ranks, before any backward pass."""
        # Of the host's numbers: the device may still be at the reference's pass.
        samples = [sample for batch in minibatch for sample in batch.samples]
        lengths = torch.tensor([len(sample.rollout.completion.token_ids) for sample in samples])
        mask = torch.tensor([float(sample.keep) for sample in samples])
        local = torch.tensor([len(mask), float((lengths * mask).sum())], dtype=torch.float64)
        num_sequences, num_tokens = all_reduce_data(self.ranks, local).tolist()
        weights = token_weights(
            lengths,
            mask,
            loss_type=self.config.loss.loss_type,
            max_length=self.config.rollout.max_completion_length,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
        )
        num_tokens = max(1.0, num_tokens)
        num_entropy_tokens, threshold = num_tokens, None
        if self.config.loss.top_entropy_quantile < 1:
            # One more pass without gradients: the quantile is over the step, not a micro-batch or rank.
            local = torch.cat([self._entropy(b)[b.sequence_mask[b.sequence_ids] > 0] for b in minibatch])
            entropy = torch.cat(all_gather_data(self.ranks, local))
            threshold = entropy_threshold(entropy, self.config.loss.top_entropy_quantile)
            num_entropy_tokens = max(1.0, float((entropy >= threshold).sum()))
        return LossNormalizers(
            token_weights=list(
                upload(weights, self.policy.device).split([batch.num_sequences for batch in minibatch])
            ),
            num_tokens=num_tokens,
            num_entropy_tokens=num_entropy_tokens,
            entropy_threshold=threshold,
        )

    def _backward(
        self, experience: Experience, weights_S: Tensor, normalizers: LossNormalizers, token_means: TokenMeans
    ) -> tuple[Tensor, Experience]:
        """Accumulate the gradient of one micro-batch; returns its loss, and itself with old logprobs."""
        config, batch = self.config.loss, experience.batch
        kl_in_loss = config.beta > 0 and config.kl_in == "loss"
        reference = experience.reference_logprobs if kl_in_loss else None
        is_full_kl = config.kl_estimator == "full"
        with profile_range("forward"):
            hidden = self.policy.completion_hidden(batch)
        with profile_range("head"):
            now = self.policy.token_statistics(
                hidden,
                batch,
                self.config.training_temperature,
                reference=reference if is_full_kl else None,
                needs_entropy_gradient=self.coefficients.entropy != 0,
            )
        if experience.old_logprobs is None:
            experience = replace(experience, old_logprobs=now.logprobs.detach())
        assert experience.old_logprobs is not None
        multipliers = self._token_multipliers(
            experience, now.logprobs.detach(), now.entropy.detach(), normalizers
        )
        multiplier = None
        for value in multipliers.values():
            multiplier = value if multiplier is None else multiplier * value
        ids, num_sequences = batch.sequence_ids, batch.num_sequences
        outputs = policy_loss(
            LossInputs(
                logprobs=now.logprobs,
                old_logprobs=experience.old_logprobs,
                advantages=experience.advantages,
                ratio=importance_ratio(
                    now.logprobs, experience.old_logprobs, ids, num_sequences, ratio_level(config)
                ),
                sequence_ids=ids,
                num_sequences=num_sequences,
            ),
            config,
            beta=self.coefficients.beta,
            multiplier=multiplier,
            reference_logprobs=None if is_full_kl else reference,
            full_kl=now.full_kl,
        )
        if experience.reward_kl is not None:
            outputs = replace(outputs, kl=experience.reward_kl)
        loss = (outputs.loss * weights_S[batch.sequence_ids]).sum()
        if self.coefficients.entropy:
            # A mean over the tokens it acts on, whatever the averaging of the loss type (as in TRL).
            mask = batch.sequence_mask[batch.sequence_ids] * multipliers.get("low_entropy", 1.0)
            bonus = self.coefficients.entropy * (now.entropy * mask).sum() / normalizers.num_entropy_tokens
            loss = loss - bonus
        total = loss
        if self.critic is not None:
            error = self._value_error(experience, hidden)
            token_means.add(len(error), value_loss=error.detach())
            total = loss + (error * batch.sequence_mask[batch.sequence_ids]).sum() / normalizers.num_tokens
        with profile_range("backward"):
            total.backward()
        self._add_metrics(token_means, experience, now.entropy.detach(), outputs, multipliers)
        self._record(experience, now, outputs, multipliers, multiplier)
        return loss.detach().double(), experience

    def _add_metrics(
        self,
        token_means: TokenMeans,
        experience: Experience,
        entropy: Tensor,
        outputs: PolicyLoss,
        multipliers: dict[str, Tensor],
    ) -> None:
        batch = experience.batch
        if self.config.loss.is_supervised:
            return token_means.add(len(batch.targets), entropy=entropy, kl=outputs.kl)
        assert experience.old_logprobs is not None
        difference = batch.sampler_logprobs - experience.old_logprobs
        token_means.add(
            len(batch.targets),
            entropy=entropy,
            kl=outputs.kl,
            **{
                "clip_ratio/region_mean": outputs.clipped,
                "clip_ratio/low_mean": outputs.clipped * (experience.advantages < 0),
                "clip_ratio/high_mean": outputs.clipped * (experience.advantages > 0),
                "sampling/sampling_logp_difference/mean": difference.abs(),
                "masked_ratio/truncated_completions": 1 - batch.sequence_mask[batch.sequence_ids],
                **{f"masked_ratio/{name}": (value == 0).float() for name, value in multipliers.items()},
                "sampling/importance_sampling_clipped_ratio": self._truncated(
                    multipliers.get("importance_correction")
                ),
            },
        )

    def _record(
        self,
        experience: Experience,
        now: TokenStatistics,
        outputs: PolicyLoss,
        multipliers: dict[str, Tensor],
        multiplier: Tensor | None,
    ) -> None:
        """Keep what the loss saw of each token (run/token_log.py writes some of it)."""
        batch = experience.batch
        mask = batch.sequence_mask[batch.sequence_ids]
        correction = multipliers.get("importance_correction")
        bound = self._truncated(correction)
        if correction is not None and bound is None:
            bound = (correction == 0).float()
        self.tokens.add(
            batch,
            logprob=now.logprobs.detach(),
            old_logprob=experience.old_logprobs,
            sampler_logprob=batch.sampler_logprobs,
            entropy=now.entropy.detach(),
            advantage=experience.advantages,
            weight=mask if multiplier is None else mask * multiplier,
            kl=outputs.kl,
            value=experience.values,
            clipped=outputs.clipped,
            importance_bound=bound,
            off_policy=_removed(multipliers.get("off_policy")),
            low_entropy=_removed(multipliers.get("low_entropy")),
            truncated_completion=1 - mask,
        )

    def _value_error(self, experience: Experience, hidden: Tensor) -> Tensor:
        """The critic's loss per token. A trunk shared with the policy gets `value_coef` of its gradient."""
        assert self.critic is not None and experience.values is not None and experience.returns is not None
        coef = self.config.critic.value_coef
        hidden = hidden * coef + hidden.detach() * (1 - coef)  # the same value, `coef` of the gradient
        values = self.critic.values(experience.batch, hidden)
        return value_loss(values, experience.values, experience.returns, self.config.critic.value_clip)

    def _token_multipliers(
        self, experience: Experience, logprobs: Tensor, entropy: Tensor, normalizers: LossNormalizers
    ) -> dict[str, Tensor]:
        """Masks and importance weights [N] of the policy loss, by name."""
        config, batch = self.config.loss, experience.batch
        multipliers: dict[str, Tensor] = {}
        if config.off_policy_mask_threshold is not None:
            drift = sequence_mean(batch.sampler_logprobs - logprobs, batch.sequence_ids, batch.num_sequences)
            advantages = sequence_mean(experience.advantages, batch.sequence_ids, batch.num_sequences)
            threshold = config.off_policy_mask_threshold
            keep = off_policy_keep(advantages, drift, threshold)
            multipliers["off_policy"] = keep[batch.sequence_ids]
        if config.importance_correction != "none":
            assert experience.old_logprobs is not None
            difference = experience.old_logprobs - batch.sampler_logprobs
            multipliers["importance_correction"] = sampler_weights(
                difference, batch.sequence_ids, batch.num_sequences, config
            )
        if normalizers.entropy_threshold is not None:
            multipliers["low_entropy"] = high_entropy(entropy, normalizers.entropy_threshold)
        return multipliers

    def _truncated(self, weights: Tensor | None) -> Tensor | None:
        """1 for tokens whose importance weight was truncated at a bound; None without truncation."""
        config = self.config.loss
        if weights is None or not config.importance_correction.endswith("truncate"):
            return None
        low, high = config.importance_correction_min, config.importance_correction_max
        return ((weights >= high) | ((weights <= low) & (low > 0))).float()

    @torch.no_grad()
    def _entropy(self, batch: Batch) -> Tensor:
        hidden = self.policy.completion_hidden(batch)
        return self.policy.token_statistics(hidden, batch, self.config.training_temperature).entropy


def _removed(multiplier: Tensor | None) -> Tensor | None:
    """1 for tokens that a multiplier takes out of the loss."""
    return None if multiplier is None else (multiplier == 0).float()


def profile_range(name: str) -> record_function:
    """A range of a step, by which `whet profile` attributes kernels. It costs about a microsecond."""
    return record_function(PREFIX + name)
