"""Experience -> optimiser steps.

One call of `Updater.step` uses one batch of rollouts: `num_iterations` times over its parts, an optimiser
step each, every step accumulated over packed micro-batches. Owns the optimisers, the critic, the reference
and the coefficients that adapt; `tensors` and `numbers` are all of it. Where there are several ranks, each
brings its share of the micro-batches, and everything that is counted is counted over all of them. Knows
nothing of problems or engines.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from whetstone.algorithm.gae import explained_variance, value_loss
from whetstone.algorithm.losses import LossInputs, policy_loss
from whetstone.algorithm.masks import high_entropy, off_policy_keep, sampler_weights, sequence_mean
from whetstone.algorithm.reduce import token_weights
from whetstone.config import Config, Plan
from whetstone.errors import UserError
from whetstone.model.critic import Critic
from whetstone.model.policy import Policy, should_compile
from whetstone.model.reference import Reference
from whetstone.optimizer import Optimiser
from whetstone.parallel.collectives import gather_of_data, sum_of_data
from whetstone.parallel.mesh import ALONE
from whetstone.terminal.stages import advance, stage
from whetstone.types import Group
from whetstone.update.accumulators import Counts, Sums, Totals
from whetstone.update.coefficients import Coefficients
from whetstone.update.experience import Experience, Preparer, halves
from whetstone.update.micro_batch_size import Budget, find
from whetstone.update.oom import halve, too_little, while_memory_lasts
from whetstone.update.packing import Batch, halves_of
from whetstone.update.profile_range import mark

logger = logging.getLogger("whetstone")
T = TypeVar("T")


class Updater:
    def __init__(self, policy: Policy, config: Config, plan: Plan, reference: Reference | None):
        self.policy = policy
        self.config = config
        self.plan = plan
        self.reference = reference  # None without beta, and for a local KL
        self.ranks = policy.ranks
        common: Any = {"ranks": policy.ranks, "offload": config.parallel.cpu_offload != "none"}
        self.optimiser = Optimiser(
            policy.parameters,
            config.update,
            num_steps=plan.num_steps,
            warmup_steps=plan.warmup_steps,
            **common,
        )
        self.critic: Critic | None = None
        if config.loss.advantage == "gae":
            self.critic = Critic(policy, config.critic.critic)
            settings = {"learning_rate": config.critic.critic_learning_rate, "lr_scheduler_type": "constant"}
            self.critic_optimiser = Optimiser(
                self.critic.parameters,
                config.update.model_copy(update=settings),
                num_steps=plan.num_steps,
                warmup_steps=0,
                **common,
            )
        if should_compile(config.model, policy):
            policy.compile_layers()
        self.coefficients = Coefficients(config.loss)
        self.preparer = Preparer(policy, reference, self.critic, config)
        size = config.update.micro_batch_tokens
        self.budget = Budget(tokens=0 if size == "auto" else size)
        self.steps_done = 0
        self.skipped_in_a_row = 0

    def micro_batch_tokens(self, groups: Sequence[Group]) -> int:
        """How many tokens a micro-batch may have; tried out at the first batch, when all else is in place."""
        if self.budget.tokens == 0:
            may_run_again = self.config.model.gradient_checkpointing == "auto"
            try:
                with stage("finding the size of micro-batches"):
                    self.budget = find(self.policy, self._attempt, groups, may_run_again=may_run_again)
            except torch.OutOfMemoryError as error:
                raise too_little(error, self.ranks, self.budget.tokens) from None
        return self.budget.tokens

    def _attempt(self, batches: list[Batch]) -> None:
        """Forward and backward passes that nothing is learnt from, to see what memory they take."""
        [part] = self.preparer.prepare([batches], num_generations=1, beta=self.coefficients.beta)
        self.policy.model.train()
        try:
            self._collect(part)
        finally:
            self._forget()

    def step(self, minibatches: Sequence[Sequence[Batch]], seed: int) -> dict[str, float]:
        """All optimiser steps of one batch of rollouts; the metrics are token means over them.

        `seed` fixes what is random in the forward pass (LoRA dropout), so that a resumed run repeats it.
        """
        torch.manual_seed(seed)
        totals = Totals()
        try:
            parts = self._prepare([list(part) for part in minibatches], totals)
            row = self._foresight(parts)
            self.policy.model.train()
            iterations = self.config.update.num_iterations
            with stage("update", total=iterations * sum(map(len, parts))):
                for part in [part for _ in range(iterations) for part in parts]:
                    self._optimiser_step(part, totals)
        except torch.OutOfMemoryError as error:
            raise too_little(error, self.ranks, self.budget.tokens) from None
        return {**row, **totals.means(), **self.coefficients.row(), **self.budget.row()}

    def _prepare(self, minibatches: list[list[Batch]], totals: Totals) -> list[list[Experience]]:
        def work() -> list[list[Experience]]:
            numbers = {"num_generations": self.plan.num_generations, "beta": self.coefficients.beta}
            return self.preparer.prepare(minibatches, **numbers)

        def cut() -> bool:
            cuts = [halve(part, halves_of) for part in minibatches]
            return any(cuts)

        with mark("prepare"), stage("logprobs"):
            return self._in_memory(work, cut, totals)

    def _foresight(self, parts: Sequence[Sequence[Experience]]) -> dict[str, float]:
        """How much of the returns the critic foresaw, before it learnt from them."""
        if self.critic is None:
            return {}
        every = [experience for part in parts for experience in part]
        values = torch.cat([e.values for e in every if e.values is not None])
        returns = torch.cat([e.returns for e in every if e.returns is not None])
        values, returns = (torch.cat(gather_of_data(self.ranks, mine)) for mine in (values, returns))
        return {"explained_variance": explained_variance(values, returns)}

    def tensors(self) -> dict[str, Any]:
        """The tensors that a resumed run needs (the policy's weights among them), nested by name."""
        state: dict[str, Any] = {"optimiser": self.optimiser.tensors()}
        if self.critic is not None:
            state["critic_optimiser"] = self.critic_optimiser.tensors()
        if self.reference is not None and self.config.loss.kl_reference == "moving":
            state["reference"] = self.reference.state()
        return state

    def load_tensors(self, state: dict[str, Any]) -> None:
        """Go on from `state`, which is `tensors()` with the numbers of a checkpoint read into it."""
        self.optimiser.load_tensors(state["optimiser"])
        if self.critic is not None:
            self.critic_optimiser.load_tensors(state["critic_optimiser"])
        if "reference" in state:
            assert self.reference is not None
            self.reference.load_state(state["reference"])

    def numbers(self) -> dict[str, Any]:
        """The rest of it, as plain numbers."""
        return {
            "schedule": self.optimiser.numbers(),
            "critic_schedule": None if self.critic is None else self.critic_optimiser.numbers(),
            "coefficients": self.coefficients.state(),
            "steps_done": self.steps_done,
            "budget": asdict(self.budget),
            "layout": self.ranks.layout,
        }

    def load_numbers(self, numbers: dict[str, Any]) -> None:
        self.optimiser.load_numbers(numbers["schedule"])
        if self.critic is not None and numbers["critic_schedule"] is not None:
            self.critic_optimiser.load_numbers(numbers["critic_schedule"])
        self.coefficients.load_state(numbers["coefficients"])
        self.steps_done = numbers["steps_done"]
        # Runs of earlier versions have none. Where the weights lie otherwise now, other budgets fit.
        found = Budget(**numbers.get("budget", {"tokens": 0}))
        fits = numbers.get("layout", ALONE.layout) == self.ranks.layout
        if self.config.update.micro_batch_tokens == "auto" and found.tokens and fits:
            self.budget = found
            if found.layers_run_again is not None:
                self.policy.run_layers_again(found.layers_run_again)

    def _collect(self, part: list[Experience]) -> tuple[float, Sums]:
        """The gradient of one optimiser step, micro-batch by micro-batch; its loss, and sums over its tokens.

        From here on `part` has the old logprobs too.
        """
        counts = self._count([experience.batch for experience in part])
        self.optimiser.expect(len(part))
        if self.critic is not None:
            self.critic_optimiser.expect(len(part))
        sums = Sums(self.ranks)
        loss = torch.zeros((), dtype=torch.float64, device=self.policy.device)
        for index, experience in enumerate(part):
            value, part[index] = self._backward(experience, counts.weights[index], counts, sums)
            loss += value
            advance()
        return sum_of_data(self.ranks, loss).item(), sums

    def _in_memory(self, work: Callable[[], T], cut: Callable[[], bool], totals: Totals) -> T:
        """`work()`; where memory runs out, all of it again in micro-batches of half the size, made by `cut`.

        Not where weights are spread: other ranks wait for this one in the middle of a layer, and FSDP does
        not get over a pass that broke off.
        """

        def less() -> bool:
            self._forget()
            if self.policy.spread is not None or not cut():
                return False
            self.budget.tokens = max(1, self.budget.tokens // 2)
            totals.splits += 1
            logger.warning(
                f"The GPU's memory ran out: micro-batches have at most {self.budget.tokens:,} tokens from "
                "now on."
            )
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()
            return True

        return while_memory_lasts(work, less)

    def _forget(self) -> None:
        self.optimiser.forget()
        if self.critic is not None:
            self.critic_optimiser.forget()

    def _optimiser_step(self, part: list[Experience], totals: Totals) -> None:
        loss, sums = self._in_memory(lambda: self._collect(part), lambda: halve(part, halves), totals)
        with mark("optimiser"):
            norm = self.optimiser.gradient_norm()
        means = sums.means()
        totals.add(means, loss=loss, grad_norm=norm, learning_rate=self.optimiser.learning_rate)
        if math.isfinite(loss) and math.isfinite(norm):
            with mark("optimiser"):
                self._move(norm)
        else:
            self._skip(loss, norm, totals)
        self.optimiser.finish()
        if self.critic is not None:
            self.critic_optimiser.finish()
        self.steps_done += 1
        self.coefficients.adapt(means)
        is_due = self.steps_done % self.config.loss.ref_model_sync_steps == 0
        if self.reference is not None and self.config.loss.kl_reference == "moving" and is_due:
            self.reference.follow(self.config.loss.ref_model_mixup_alpha)

    def _move(self, norm: float) -> None:
        if self.steps_done >= self.config.critic.critic_warmup_steps or self.critic is None:
            self.optimiser.step(norm)
        if self.critic is not None:
            self.critic_optimiser.step(self.critic_optimiser.gradient_norm())
        self.skipped_in_a_row = 0

    def _backward(
        self, experience: Experience, weights_S: Tensor, counts: Counts, sums: Sums
    ) -> tuple[Tensor, Experience]:
        """Accumulate the gradient of one micro-batch; returns its loss, and itself with old logprobs."""
        config, batch = self.config.loss, experience.batch
        in_loss = config.beta > 0 and config.kl_in == "loss"
        whole = experience.reference if in_loss and config.kl_estimator == "full" else None
        with mark("forward"):
            rows = self.policy.rows(batch)
        with mark("head"):
            now = self.policy.statistics(rows, batch, self.config.rollout.temperature, whole)
        if experience.old_logprobs is None:
            experience = replace(experience, old_logprobs=now.logprobs.detach())
        assert experience.old_logprobs is not None
        factors = self._factors(experience, now.logprobs.detach(), now.entropy.detach(), counts)
        factor = None
        for one in factors.values():
            factor = one if factor is None else factor * one
        outputs = policy_loss(
            LossInputs(
                logprobs=now.logprobs,
                old_logprobs=experience.old_logprobs,
                advantages=experience.advantages,
                sequence=batch.sequence,
                num_sequences=batch.num_sequences,
                reference_logprobs=experience.reference if in_loss and whole is None else None,
                full_kl=now.full_kl,
                factor=factor,
            ),
            config,
            beta=self.coefficients.beta,
        )
        loss = (outputs.loss * weights_S[batch.sequence]).sum()
        if self.coefficients.entropy:
            # A mean over the tokens it acts on, whatever the loss type makes of lengths (as in TRL).
            acts_on = batch.keep[batch.sequence] * factors.get("low_entropy", 1.0)
            loss = loss - self.coefficients.entropy * (now.entropy * acts_on).sum() / counts.entropy_tokens
        total = loss
        if self.critic is not None:
            error = self._value_error(experience, rows)
            sums.add(len(error), value_loss=error.detach())
            total = loss + (error * batch.keep[batch.sequence]).sum() / counts.tokens
        with mark("backward"):
            total.backward()
        difference = batch.sampler_logprobs - experience.old_logprobs
        sums.add(
            len(batch.targets),
            entropy=now.entropy.detach(),
            kl=outputs.kl,
            **{
                "clip_ratio/region_mean": outputs.clipped,
                "sampling/sampling_logp_difference/mean": difference.abs(),
                "masked_ratio/truncated_completions": 1 - batch.keep[batch.sequence],
                **{f"masked_ratio/{name}": (factor == 0).float() for name, factor in factors.items()},
                "sampling/importance_sampling_clipped_ratio": self._truncated(
                    factors.get("importance_correction")
                ),
            },
        )
        return loss.detach().double(), experience

    def _value_error(self, experience: Experience, rows: Tensor) -> Tensor:
        """The critic's loss per token. A trunk that it shares with the policy feels `value_coef` of it."""
        assert self.critic is not None and experience.values is not None and experience.returns is not None
        share = self.config.critic.value_coef
        rows = rows * share + rows.detach() * (1 - share)  # the same value, `share` of the gradient
        values = self.critic.values(experience.batch, rows)
        return value_loss(values, experience.values, experience.returns, self.config.critic.value_clip)

    def _factors(
        self, experience: Experience, logprobs: Tensor, entropy: Tensor, counts: Counts
    ) -> dict[str, Tensor]:
        """The factor of every token's policy loss by mechanism; 0: the mechanism masks the token."""
        config, batch = self.config.loss, experience.batch
        factors: dict[str, Tensor] = {}
        if config.off_policy_mask_threshold is not None:
            drift = sequence_mean(batch.sampler_logprobs - logprobs, batch.sequence, batch.num_sequences)
            advantages = sequence_mean(experience.advantages, batch.sequence, batch.num_sequences)
            threshold = config.off_policy_mask_threshold
            keep = off_policy_keep(advantages, drift, threshold, config.off_policy_mask)
            factors["off_policy"] = keep[batch.sequence]
        if config.importance_correction != "none":
            assert experience.old_logprobs is not None
            difference = experience.old_logprobs - batch.sampler_logprobs
            factors["importance_correction"] = sampler_weights(
                difference, batch.sequence, batch.num_sequences, config
            )
        if counts.entropy_threshold is not None:
            factors["low_entropy"] = high_entropy(entropy, counts.entropy_threshold)
        return factors

    def _truncated(self, weights: Tensor | None) -> Tensor | None:
        """1 for tokens whose importance weight was cut at a bound; None where nothing is cut."""
        config = self.config.loss
        if weights is None or not config.importance_correction.endswith("truncate"):
            return None
        low, high = config.importance_correction_min, config.importance_correction_max
        return ((weights >= high) | ((weights <= low) & (low > 0))).float()

    def _count(self, part: list[Batch]) -> Counts:
        """Everything that is counted over the whole optimiser step before any backward pass."""
        lengths = torch.cat([torch.bincount(b.sequence, minlength=b.num_sequences) for b in part])
        keep = torch.cat([batch.keep for batch in part])
        mine = torch.tensor([len(keep), float((lengths * keep).sum())], dtype=torch.float64)
        num_sequences, num_tokens = sum_of_data(self.ranks, mine).tolist()
        weights = token_weights(
            lengths,
            keep,
            loss_type=self.config.loss.loss_type,
            max_length=self.config.rollout.max_completion_length,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
        )
        tokens = max(1.0, num_tokens)
        entropy_tokens, threshold = tokens, None
        if self.config.loss.top_entropy_quantile < 1:
            # One more pass without gradients: the quantile is that of the step, not of a micro-batch or rank.
            mine = torch.cat([self._entropy_now(b)[b.keep[b.sequence] > 0] for b in part])
            entropy = torch.cat(gather_of_data(self.ranks, mine))
            threshold = torch.quantile(entropy, 1 - self.config.loss.top_entropy_quantile)
            entropy_tokens = max(1.0, float((entropy >= threshold).sum()))
        return Counts(
            weights=list(weights.split([batch.num_sequences for batch in part])),
            tokens=tokens,
            entropy_tokens=entropy_tokens,
            entropy_threshold=threshold,
        )

    @torch.no_grad()
    def _entropy_now(self, batch: Batch) -> Tensor:
        rows = self.policy.rows(batch)
        return self.policy.statistics(rows, batch, self.config.rollout.temperature).entropy

    def _skip(self, loss: float, norm: float, totals: Totals) -> None:
        totals.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.config.update.max_skipped_steps:
            raise UserError(
                f"{self.skipped_in_a_row} steps in a row had a loss ({loss}) or gradient norm ({norm}) that "
                "is not finite, and were skipped: lower learning_rate, or go back to an earlier checkpoint "
                "with resume_from_checkpoint."
            )
