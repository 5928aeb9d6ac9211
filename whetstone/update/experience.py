"""Packed batches -> experience: old and reference logprobs, values, advantages.

Computed once, before the first update on a batch. `kl_in: reward` subtracts the KL from the reward first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whetstone.algorithm.advantages import discounted, estimate, gae, whiten
from whetstone.algorithm.losses import ESTIMATORS
from whetstone.config import Config
from whetstone.model.critic import Critic
from whetstone.model.policy import Policy
from whetstone.model.reference import Reference
from whetstone.parallel.collectives import all_gather_data, all_reduce_data, min_over_ranks
from whetstone.update.packing import Batch, slice_sequences


@dataclass(frozen=True, kw_only=True)
class Experience:
    """A micro-batch with everything that its updates need. Tensors are [N], one entry per token."""

    batch: Batch
    advantages: Tensor
    old_logprobs: Tensor | None = None  # None: the first update is on-policy and computes them
    reference_logprobs: Tensor | None = None  # [N]; [N, V] for the full KL
    reward_kl: Tensor | None = None  # what `kl_in: reward` subtracts from the reward, without beta
    values: Tensor | None = None  # of the critic before any update
    returns: Tensor | None = None  # the critic's targets


def split_experience(experience: Experience) -> list[Experience]:
    """Two micro-batches with half of the completions each; a single completion stays whole."""
    total = experience.batch.num_sequences
    if total < 2:
        return [experience]
    halves = []
    for first, last in ((0, total // 2), (total // 2, total)):
        batch, index = slice_sequences(experience.batch, first, last)
        tensors = {
            name: value[index] for name, value in vars(experience).items() if isinstance(value, Tensor)
        }
        halves.append(replace(experience, batch=batch, **tensors))
    return halves


@dataclass
class ExperienceBuilder:
    """Runs the policy, its reference and its critic on packed batches, and computes advantages."""

    policy: Policy
    reference: Reference | None
    critic: Critic | None
    config: Config

    @torch.no_grad()
    def build(
        self, minibatches: Sequence[Sequence[Batch]], *, num_generations: int, beta: float
    ) -> list[list[Experience]]:
        """`beta`: the current weight of a KL in the reward."""
        self.policy.modes.train(False)
        on_device = [[batch.to(self.policy.device) for batch in minibatch] for minibatch in minibatches]
        # With several minibatches the later ones meet an updated policy, so their old logprobs are computed
        # now. With one, the first update is on-policy, and its own logprobs serve as the old ones.
        needs_old = self._needs_old(len(on_device))
        flat = [self._with_logprobs(batch, needs_old) for minibatch in on_device for batch in minibatch]
        if self.reference is not None and not self._kl_to_sampler:
            with self.reference.swapped_in():  # once for all: its weights may be offloaded
                flat = [replace(e, reference_logprobs=self._reference_logprobs(e.batch)) for e in flat]
            if self.config.loss.kl_in == "reward":
                flat = [replace(e, reward_kl=self._reward_kl(e)) for e in flat]
        if self.critic is not None:
            flat = self._with_gae(flat, beta)
        elif not self.config.loss.is_supervised:  # solutions have no advantages
            flat = self._with_baseline(flat, num_generations, beta)
        remaining = iter(flat)
        return [[next(remaining) for _ in minibatch] for minibatch in on_device]

    def num_passes(self, num_minibatches: int) -> int:
        """Forward passes of the model that `build` takes for each token."""
        is_own = self._needs_old(num_minibatches) or self.critic is not None
        return is_own + (self.reference is not None and not self._kl_to_sampler)

    def _needs_old(self, num_minibatches: int) -> bool:
        loss = self.config.loss
        return num_minibatches > 1 or self._kl_to_sampler or (loss.beta > 0 and loss.kl_in == "reward")

    @property
    def _kl_to_sampler(self) -> bool:
        return self.config.loss.beta > 0 and self.config.loss.kl_reference == "rollout"

    def _with_logprobs(self, batch: Batch, needs_old: bool) -> Experience:
        """Old logprobs where needed, and the critic's values; advantages are not known yet."""
        experience = Experience(batch=batch, advantages=torch.zeros_like(batch.sampler_logprobs))
        if batch.is_skipped or (not needs_old and self.critic is None):
            return experience
        hidden = self.policy.completion_hidden(batch)
        statistics, temperature = self.policy.token_statistics, self.config.training_temperature
        old = statistics(hidden, batch, temperature).logprobs if needs_old else None
        values = None if self.critic is None else self.critic.values(batch, hidden)
        reference = None
        if self._kl_to_sampler:
            reference = old if self.config.loss.kl_estimator != "full" else self._reference_logprobs(batch)
        return replace(experience, old_logprobs=old, reference_logprobs=reference, values=values)

    def _reference_logprobs(self, batch: Batch) -> Tensor:
        """[N] of the sampled tokens; [N, V] of the whole vocabulary for the full KL."""
        full, policy = self.config.loss.kl_estimator == "full", self.policy
        return (policy.all_logprobs if full else policy.logprobs)(batch, self.config.training_temperature)

    def _reward_kl(self, experience: Experience) -> Tensor:
        assert experience.old_logprobs is not None and experience.reference_logprobs is not None
        estimator = ESTIMATORS[self.config.loss.kl_estimator]
        return estimator(experience.old_logprobs, experience.reference_logprobs)

    def _with_baseline(self, flat: list[Experience], num_generations: int, beta: float) -> list[Experience]:
        """One advantage per credited turn, from the rewards of all completions on all ranks."""
        loss, ranks, environments = self.config.loss, self.policy.ranks, self.config.environments
        num_local = torch.tensor(sum(e.batch.num_sequences for e in flat))
        most_turns = -min_over_ranks(ranks, -max(e.batch.rewards.shape[1] for e in flat))
        shape = (int(all_reduce_data(ranks, num_local)), int(most_turns))
        rewards, exists = (torch.zeros(shape, device=self.policy.device) for _ in range(2))
        for e in flat:
            turns = (e.batch.sequence_ids, e.batch.turn_ids)
            penalty = torch.zeros_like(e.batch.rewards)
            if e.reward_kl is not None:
                penalty.index_put_(turns, beta * e.reward_kl, accumulate=True)
            width = e.batch.rewards.shape[1]
            rewards[e.batch.batch_index, :width] = e.batch.rewards - penalty
            exists[e.batch.batch_index, 0] = 1
            exists[e.batch.batch_index[turns[0]], turns[1]] = 1
        # 0 for completions of other ranks
        rewards, exists = (
            all_reduce_data(ranks, table).view(-1, num_generations, shape[1]) for table in (rewards, exists)
        )
        returns = discounted(rewards, environments.turn_discount)
        advantages = estimate(returns, exists > 0, baseline=loss.advantage, scale=loss.scale_rewards)
        advantages = advantages.view(shape)
        return [
            replace(e, advantages=advantages[e.batch.batch_index[e.batch.sequence_ids], e.batch.turn_ids])
            for e in flat
        ]

    def _with_gae(self, flat: list[Experience], beta: float) -> list[Experience]:
        """One advantage per token, from the critic's values."""
        critic, estimated = self.config.critic, []
        for e in flat:
            assert e.values is not None
            rewards = torch.zeros_like(e.values) if e.reward_kl is None else -beta * e.reward_kl
            width = e.batch.rewards.shape[1]
            turns = e.batch.sequence_ids * width + e.batch.turn_ids  # in order
            lengths = torch.bincount(turns, minlength=e.batch.num_sequences * width)
            has_tokens = lengths > 0
            ends = lengths.cumsum(0) - 1
            rewards[ends[has_tokens]] += e.batch.rewards.flatten()[has_tokens]  # all at its last token
            advantages, returns = gae(
                rewards, e.values, e.batch.sequence_ids, gamma=critic.gamma, gae_lambda=critic.gae_lambda
            )
            estimated.append(replace(e, advantages=advantages, returns=returns))
        if self.config.loss.scale_rewards == "none":
            return estimated
        ranks, local = self.policy.ranks, torch.cat([e.advantages for e in estimated])
        gathered = all_gather_data(ranks, local)
        whitened = whiten(torch.cat(gathered)).split([len(part) for part in gathered])[ranks.data_rank]
        whitened = whitened.split([len(e.advantages) for e in estimated])
        return [replace(e, advantages=part) for e, part in zip(estimated, whitened, strict=True)]
