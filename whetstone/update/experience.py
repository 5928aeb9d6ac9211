"""Packed batches -> experience: what the models say of them before the first update, and the advantages.

Old logprobs, the reference's, the critic's values; then the reward, less the KL where `kl_in` says so,
becomes an advantage for every token. Fixed from here on, however often the batch is used. Moves no weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whetstone.algorithm.advantages import estimate
from whetstone.algorithm.gae import gae, whiten
from whetstone.algorithm.kl import ESTIMATORS
from whetstone.config import Config
from whetstone.model.critic import Critic
from whetstone.model.policy import Policy
from whetstone.model.reference import Reference
from whetstone.parallel.collectives import gather_of_data, sum_of_data
from whetstone.update.packing import Batch, cut_out


@dataclass(frozen=True, kw_only=True)
class Experience:
    """A micro-batch with everything that its updates need. Tensors are [N], one entry per token."""

    batch: Batch
    advantages: Tensor
    old_logprobs: Tensor | None  # None: the first update is on-policy, and its own logprobs are these
    reference: Tensor | None  # logprobs of the reference, [N] or, for the full KL, [N, V]
    values: Tensor | None  # by the critic, before any update
    returns: Tensor | None  # what it should have said


def halves(experience: Experience) -> list[Experience]:
    """The same in two micro-batches, half of the completions each; one completion stays whole."""
    total = experience.batch.num_sequences
    if total < 2:
        return [experience]
    parts = []
    for first, last in ((0, total // 2), (total // 2, total)):
        batch, mine = cut_out(experience.batch, first, last)
        tensors = {name: value[mine] for name, value in vars(experience).items() if isinstance(value, Tensor)}
        parts.append(replace(experience, batch=batch, **tensors))
    return parts


class Preparer:
    """Makes experience; has the policy, its reference and its critic at hand."""

    def __init__(self, policy: Policy, reference: Reference | None, critic: Critic | None, config: Config):
        self.policy = policy
        self.reference = reference
        self.critic = critic
        self.config = config
        self.temperature = config.rollout.temperature

    @torch.no_grad()
    def prepare(
        self, minibatches: Sequence[Sequence[Batch]], *, num_generations: int, beta: float
    ) -> list[list[Experience]]:
        """`beta` is the weight that a KL in the reward has at the moment."""
        self.policy.model.eval()
        parts = [[batch.to(self.policy.device) for batch in part] for part in minibatches]
        # With several parts the later ones meet a policy that has moved, so their old logprobs must be taken
        # now. With one part the first update is on-policy by construction and leaves its logprobs for the
        # others: no extra pass.
        needs_old = len(parts) > 1 or self._is_local or self.config.loss.kl_in == "reward"
        bare = [[self._annotate(batch, needs_old) for batch in part] for part in parts]
        flat = [experience for part in bare for experience in part]
        if self.reference is not None and not self._is_local:
            with self.reference.active():  # once for all of them: its weights may come from the host
                flat = [replace(e, reference=self._all_or_own(e.batch)) for e in flat]
        if self.critic is not None:
            flat = self._with_gae(flat, beta)
        else:
            flat = self._with_baseline(flat, num_generations, beta)
        rest = iter(flat)
        return [[next(rest) for _ in part] for part in parts]

    @property
    def _is_local(self) -> bool:
        return self.config.loss.beta > 0 and self.config.loss.kl_reference == "rollout"

    def _annotate(self, batch: Batch, needs_old: bool) -> Experience:
        rows = self.policy.rows(batch) if needs_old or self.critic is not None else None
        old = None
        if needs_old:
            assert rows is not None
            old = self.policy.statistics(rows, batch, self.temperature).logprobs
        values = None
        if self.critic is not None:
            assert rows is not None
            values = self.critic.values(batch, rows)
        reference = None
        if self._is_local:
            reference = old if self.config.loss.kl_estimator != "full" else self._all_or_own(batch)
        return Experience(
            batch=batch,
            advantages=torch.zeros_like(batch.sampler_logprobs),
            old_logprobs=old,
            reference=reference,
            values=values,
            returns=None,
        )

    def _all_or_own(self, batch: Batch) -> Tensor:
        """Logprobs of all tokens of the vocabulary where the whole KL needs them, else of the batch's own."""
        full = self.config.loss.kl_estimator == "full"
        return (self.policy.all_logprobs if full else self.policy.logprobs)(batch, self.temperature)

    def _kl_penalty(self, experience: Experience, beta: float) -> Tensor:
        """What the KL takes off the reward at each token; 0 where it is part of the loss."""
        if self.config.loss.kl_in != "reward" or experience.reference is None:
            return torch.zeros_like(experience.advantages)
        assert experience.old_logprobs is not None
        return beta * ESTIMATORS[self.config.loss.kl_estimator](experience.old_logprobs, experience.reference)

    def _with_baseline(self, flat: list[Experience], num_generations: int, beta: float) -> list[Experience]:
        """One advantage per completion, from all completions of the batch."""
        loss, ranks = self.config.loss, self.policy.ranks
        mine = torch.tensor(sum(e.batch.num_sequences for e in flat))
        rewards = torch.zeros(int(sum_of_data(ranks, mine)), device=self.policy.device)
        for e in flat:
            penalty = torch.zeros_like(e.batch.rewards).index_add(
                0, e.batch.sequence, self._kl_penalty(e, beta)
            )
            rewards[e.batch.places] = e.batch.rewards - penalty
        table = sum_of_data(ranks, rewards).view(-1, num_generations)  # 0 where another rank has it
        advantages = estimate(table, baseline=loss.advantage, scale=loss.scale_rewards).flatten()
        return [replace(e, advantages=advantages[e.batch.places][e.batch.sequence]) for e in flat]

    def _with_gae(self, flat: list[Experience], beta: float) -> list[Experience]:
        """An advantage per token, from the critic's values."""
        critic, done = self.config.critic, []
        for e in flat:
            assert e.values is not None
            rewards = -self._kl_penalty(e, beta)
            lengths = torch.bincount(e.batch.sequence, minlength=e.batch.num_sequences)
            rewards[lengths.cumsum(0) - 1] += e.batch.rewards  # all of it at the last token
            advantages, returns = gae(
                rewards, e.values, e.batch.sequence, gamma=critic.gamma, gae_lambda=critic.gae_lambda
            )
            done.append(replace(e, advantages=advantages, returns=returns))
        if self.config.loss.scale_rewards == "none":
            return done
        ranks, mine = self.policy.ranks, torch.cat([e.advantages for e in done])
        everybodys = gather_of_data(ranks, mine)
        white = whiten(torch.cat(everybodys)).split([len(part) for part in everybodys])[ranks.data_rank]
        white = white.split([len(e.advantages) for e in done])
        return [replace(e, advantages=part) for e, part in zip(done, white, strict=True)]
