"""Rollouts -> optimizer steps: `pack`, `prepare` (experience), `update`.

Owns the optimizers, the critic, the reference and the adaptive coefficients. Each rank has its share of the
micro-batches; normalizers and metrics cover all ranks.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from whetstone.algorithm.advantages import explained_variance
from whetstone.config import Config, Plan
from whetstone.cost.memory import activation_bytes, memory_plan, setup_of
from whetstone.cost.shape import shape_of
from whetstone.errors import UserError, explained, non_finite
from whetstone.model.compilation import compile_layers, should_compile
from whetstone.model.critic import Critic
from whetstone.model.memory import usable_memory
from whetstone.model.policy import Policy
from whetstone.model.reference import Reference
from whetstone.optimizer import Optimizer
from whetstone.parallel.collectives import all_gather_data
from whetstone.terminal.stages import stage
from whetstone.terminal.text import counted
from whetstone.types import Group
from whetstone.update.coefficients import Coefficients
from whetstone.update.experience import Experience, ExperienceBuilder, split_experience
from whetstone.update.gradient import GradientAccumulator, TokenMeans, profile_range
from whetstone.update.micro_batch_size import MicroBatchSize, PlannedSize, find_size, synthetic_batch
from whetstone.update.oom import explain_oom, retry_on_oom, split_all
from whetstone.update.packing import Batch, pack_minibatches, split_batch

logger = logging.getLogger("whetstone")
T = TypeVar("T")


class Updater:
    def __init__(self, policy: Policy, config: Config, plan: Plan, reference: Reference | None):
        self.policy = policy
        self.config = config
        self.plan = plan
        self.reference = reference  # None without beta, and for a KL to the sampling policy
        self.ranks = policy.ranks
        common: Any = {"ranks": policy.ranks, "offload": config.parallel.cpu_offload != "none"}
        self.optimizer = Optimizer(
            policy.parameters(),
            config.update,
            num_steps=plan.num_steps,
            warmup_steps=plan.warmup_steps,
            **common,
        )
        self.critic: Critic | None = None
        if config.loss.advantage == "gae":
            self.critic = Critic(policy, config.critic.critic)
            settings = {"learning_rate": config.critic.critic_learning_rate, "lr_scheduler_type": "constant"}
            self.critic_optimizer = Optimizer(
                self.critic.parameters(),
                config.update.model_copy(update=settings),
                num_steps=plan.num_steps,
                warmup_steps=0,
                **common,
            )
        self._optimizers = [self.optimizer, *([self.critic_optimizer] if self.critic else [])]
        self._must_compile = should_compile(config.model, policy)
        if self._must_compile:
            compile_layers(policy)
        self.coefficients = Coefficients(config.loss)
        self.experience_builder = ExperienceBuilder(policy, reference, self.critic, config)
        self.accumulator = GradientAccumulator(policy, self.critic, config, self.coefficients)
        tokens = config.update.micro_batch_tokens
        self.micro_batch_size = MicroBatchSize(tokens=0 if tokens == "auto" else tokens)
        self.steps_done = 0
        self.consecutive_skips = 0
        self._num_skipped = self._num_oom_splits = 0  # since the last `update` ended
        self._setup_s = 0.0  # likewise

    def pack(self, groups: Sequence[Group], seed: int) -> list[list[Batch]]:
        """This rank's packed micro-batches of each minibatch. `seed` shuffles where there are several."""
        return pack_minibatches(
            groups,
            self.config,
            self.plan.minibatches,
            seed,
            max_tokens=self.micro_batch_tokens(groups),
            counts_shared=not self.policy.is_packed,
            rank=self.ranks.data_rank,
            num_ranks=self.ranks.data_size,
        )

    def prepare(self, minibatches: Sequence[Sequence[Batch]]) -> list[list[Experience]]:
        """Old and reference logprobs, values and advantages: fixed for all updates on the batch."""
        batches = [list(minibatch) for minibatch in minibatches]

        def build() -> list[list[Experience]]:
            settings: Any = {"num_generations": self.plan.num_generations, "beta": self.coefficients.beta}
            return self.experience_builder.build(batches, **settings)

        def split() -> bool:
            was_split = [split_all(minibatch, split_batch) for minibatch in batches]  # all of them
            return any(was_split)

        with profile_range("prepare"), stage("logprobs"), self._oom_as_user_error():
            return self._retry_on_oom(build, split)

    def update(self, experience: Sequence[list[Experience]], seed: int) -> dict[str, float]:
        """All optimizer steps on a batch; metrics are means over tokens and steps.

        `seed` fixes randomness of the forward pass (LoRA dropout), so that a resumed run repeats it.
        """
        torch.manual_seed(seed)
        self.policy.modes.train()
        self.accumulator.tokens.clear()
        critic_metrics = self._critic_metrics(experience)
        iterations = self.config.update.num_iterations
        num_passes = sum(not e.batch.is_skipped for minibatch in experience for e in minibatch)
        with self._oom_as_user_error(), stage("update", total=iterations * num_passes):
            steps = [self.optimizer_step(minibatch) for _ in range(iterations) for minibatch in experience]
        means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        counts = {"skipped_steps": float(self._num_skipped), "oom_splits": float(self._num_oom_splits)}
        setup = {"setup_time": self._setup_s}
        self._num_skipped = self._num_oom_splits = 0
        self._setup_s = 0.0
        size = self.micro_batch_size.metrics()
        return {**critic_metrics, **means, **counts, **self.coefficients.metrics(), **size, **setup}

    def optimizer_step(self, minibatch: list[Experience]) -> dict[str, float]:
        """Gradient, clipping, weights, schedule; a step is skipped if a loss or gradient isn't finite."""
        total, token_means = self._retry_on_oom(
            lambda: self.gradient(minibatch), lambda: split_all(minibatch, split_experience)
        )
        with profile_range("optimizer"):
            norm = self.optimizer.gradient_norm()
            critic_norm = 0.0 if self.critic is None else self.critic_optimizer.gradient_norm()
        loss, means = total.item(), token_means.means()
        metrics = {**means, "loss": loss, "grad_norm": norm, "learning_rate": self.optimizer.learning_rate}
        value_loss = means.get("value_loss", 0.0)
        broken = non_finite(
            loss=loss, gradient_norm=norm, value_loss=value_loss, gradient_norm_of_critic=critic_norm
        )
        if not broken:
            with profile_range("optimizer"):
                if self.steps_done >= self.config.critic.critic_warmup_steps or self.critic is None:
                    self.optimizer.step(norm)
                if self.critic is not None:
                    self.critic_optimizer.step(critic_norm)
            self.coefficients.adapt(means)
            self.consecutive_skips = 0
        else:
            self._num_skipped += 1
            self.consecutive_skips += 1
            if self.consecutive_skips >= self.config.update.max_skipped_steps:
                raise UserError(
                    f"{self.consecutive_skips} steps in a row were skipped, since a loss or gradient was not "
                    f"finite ({broken}): lower learning_rate (critic_learning_rate for a critic), or go back "
                    "to an earlier checkpoint with resume_from_checkpoint."
                )
        for optimizer in self._optimizers:
            optimizer.finish()
        self.steps_done += 1
        is_due = self.steps_done % self.config.loss.ref_model_sync_steps == 0
        if self.reference is not None and self.config.loss.kl_reference == "moving" and is_due:
            self.reference.ema_update(self.config.loss.ref_model_mixup_alpha, seed=self.steps_done)
        return metrics

    def gradient(self, minibatch: list[Experience]) -> tuple[Tensor, TokenMeans]:
        """Accumulate the gradient of one optimizer step over its micro-batches; returns loss and metrics.

        Afterwards every experience of `minibatch` that is not skipped has old logprobs.
        """
        normalizers = self.accumulator.normalizers([experience.batch for experience in minibatch])
        num_passes = sum(not experience.batch.is_skipped for experience in minibatch)
        for optimizer in self._optimizers:
            optimizer.reserve_accumulators(num_passes)
        return self.accumulator.accumulate(minibatch, normalizers)

    def micro_batch_tokens(self, groups: Sequence[Group]) -> int:
        """Tokens per micro-batch; `auto` is searched at the first batch, after all else is allocated."""
        started_at = time.monotonic()
        if self._must_compile:
            self._compile()
        if self.micro_batch_size.tokens == 0:
            allow = self.config.model.gradient_checkpointing == "auto"
            with self._oom_as_user_error(), stage("finding the size of micro-batches"):
                self.micro_batch_size = find_size(
                    self.policy,
                    self.trial_step,
                    groups,
                    allow_checkpointing=allow,
                    planned=self._planned_size(groups, allow_checkpointing=allow),
                )
        self._setup_s += time.monotonic() - started_at
        return self.micro_batch_size.tokens

    def _planned_size(self, groups: Sequence[Group], *, allow_checkpointing: bool) -> PlannedSize | None:
        """By the arithmetic of `whet plan`; None where it is not for this device."""
        if self.policy.device.type != "cuda" or self.ranks.world_size > 1:
            return None
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        setup = replace(
            setup_of(self.config, self.plan, prompt_tokens=max(len(r.prompt_ids) for r in rollouts)),
            completion_tokens=max(len(r.completion.token_ids) for r in rollouts),
        )
        shape = shape_of(self.config.model.model_name_or_path, self.policy.lm.config)
        memory = memory_plan(shape, setup, float(usable_memory(self.policy.device)))
        layers = memory.checkpointed if allow_checkpointing and memory.checkpointed else None
        saved = activation_bytes(shape, setup, memory.tokens, 0)
        saved -= activation_bytes(shape, setup, memory.tokens, 1)
        return PlannedSize(tokens=memory.tokens, checkpointed_layers=layers, layer_bytes=saved)

    def _compile(self) -> None:
        """Run the compiler on a short batch, before anything is measured."""
        num_layers, started_at = len(self.policy.layers), time.monotonic()
        batch = synthetic_batch(64, longest=32, prompt=8, vocab_size=self.policy.config.vocab_size)
        with self._oom_as_user_error(), stage(f"compiling {counted(num_layers, 'layer')}"):
            self.trial_step([batch])
        self._must_compile = False
        logger.info(f"Compiled {counted(num_layers, 'layer')} in {time.monotonic() - started_at:.0f} s.")

    def trial_step(self, batches: list[Batch]) -> None:
        """Forward and backward passes without an update, to measure their memory. Nothing else changes."""
        devices = [self.policy.device] if self.policy.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                [minibatch] = self.experience_builder.build(
                    [batches], num_generations=1, beta=self.coefficients.beta
                )
                self.policy.modes.train()
                self.gradient(minibatch)
        finally:
            self._zero_grad()
            self.accumulator.tokens.clear()

    def state_tensors(self) -> dict[str, Any]:
        """The tensors that a resumed run needs (the policy's weights among them), nested by name."""
        state: dict[str, Any] = {"optimizer": self.optimizer.state_tensors()}
        if self.critic is not None:
            state["critic_optimizer"] = self.critic_optimizer.state_tensors()
        if self.reference is not None and self.config.loss.kl_reference == "moving":
            state["reference"] = self.reference.state()
        return state

    def load_state_tensors(self, state: dict[str, Any]) -> None:
        """`state` is `state_tensors()` with the values of a checkpoint."""
        self.optimizer.load_state_tensors(state["optimizer"])
        if self.critic is not None:
            self.critic_optimizer.load_state_tensors(state["critic_optimizer"])
        if "reference" in state:
            assert self.reference is not None
            self.reference.load_state(state["reference"])

    def state_scalars(self) -> dict[str, Any]:
        """The rest of the state, as plain data."""
        return {
            "schedule": self.optimizer.state_scalars(),
            "critic_schedule": None if self.critic is None else self.critic_optimizer.state_scalars(),
            "coefficients": self.coefficients.state(),
            "steps_done": self.steps_done,
            "micro_batch_size": asdict(self.micro_batch_size),
            "layout": self.ranks.layout,
        }

    def load_state_scalars(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_scalars(state["schedule"])
        if self.critic is not None and state["critic_schedule"] is not None:
            self.critic_optimizer.load_state_scalars(state["critic_schedule"])
        self.coefficients.load_state(state["coefficients"])
        self.steps_done = state["steps_done"]
        # Weights that are sharded differently leave other memory free.
        size, same_layout = MicroBatchSize(**state["micro_batch_size"]), state["layout"] == self.ranks.layout
        if self.config.update.micro_batch_tokens == "auto" and size.tokens and same_layout:
            self.micro_batch_size = size
            if size.checkpointed_layers is not None:
                self.policy.checkpoint_layers(size.checkpointed_layers)

    def _critic_metrics(self, experience: Sequence[Sequence[Experience]]) -> dict[str, float]:
        """The explained variance of the returns, before the critic learns from them."""
        if self.critic is None:
            return {}
        flat = [e for minibatch in experience for e in minibatch]
        values = torch.cat([e.values for e in flat if e.values is not None])
        returns = torch.cat([e.returns for e in flat if e.returns is not None])
        values, returns = (torch.cat(all_gather_data(self.ranks, local)) for local in (values, returns))
        return {"explained_variance": explained_variance(values, returns)}

    def _retry_on_oom(self, work: Callable[[], T], split: Callable[[], bool]) -> T:
        """`work()`; on out of memory again, with micro-batches of half the size.

        Not with sharded weights: other ranks wait inside a layer, and FSDP does not recover.
        """

        def reduce() -> bool:
            self._zero_grad()
            if self.policy.sharding is not None or not split():
                return False
            self.micro_batch_size.tokens = max(1, self.micro_batch_size.tokens // 2)
            self._num_oom_splits += 1
            logger.warning(
                "The GPU's memory ran out: micro-batches have at most "
                f"{self.micro_batch_size.tokens:,} tokens from now on."
            )
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()
            return True

        return retry_on_oom(work, reduce)

    def _oom_as_user_error(self) -> contextlib.AbstractContextManager[None]:
        return explained(lambda error: explain_oom(error, self.ranks, self.micro_batch_size.tokens))

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()
