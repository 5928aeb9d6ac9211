"""The optimizer: AdamW with the learning-rate schedules of transformers, for float32 and bf16 weights.

At a learning rate of 1e-6 an update is far below the spacing of bf16 values and would be lost. So bf16
parameters are the high 16 bits of float32 masters (compact.py), and gradients accumulate in float32.
"""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from whetstone.config.update import UpdateConfig
from whetstone.errors import UserError, first_line, non_finite
from whetstone.optimizer.adamw import AdamWStep, TorchAdamW
from whetstone.optimizer.compact import CompactAdamW
from whetstone.parallel.collectives import all_reduce_ranks
from whetstone.parallel.fsdp import like, local, norm_weight
from whetstone.parallel.mesh import SINGLE, Ranks

BLOCK_NUMEL = 1 << 27  # values in one block of gradient accumulators: 512 MiB


class Optimizer:
    """step() takes the gradients that backward() left, clips, moves the weights and the schedule."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        config: UpdateConfig,
        *,
        num_steps: int,
        warmup_steps: int,
        ranks: Ranks = SINGLE,
        offload: bool = False,
    ):
        self.config = config
        self.ranks = ranks
        self.parameters = parameters
        self._sums: dict[int, Tensor] = {}  # gradients of half-precision parameters
        self._accumulators: dict[int, Tensor] = {}  # where they are summed, if there will be several
        for index, parameter in enumerate(parameters):
            if parameter.dtype != torch.float32:
                parameter.register_post_accumulate_grad_hook(functools.partial(self._accumulate, index))
        parts, coded = [local(parameter) for parameter in parameters], config.optim == "adamw_8bit"
        self.adam: TorchAdamW | CompactAdamW
        if not coded and all(part.device.type == "cpu" and part.dtype == torch.float32 for part in parts):
            self.adam = TorchAdamW(parameters)
        else:  # what the CPU trains is in its memory anyway
            offload = offload and parts[0].device.type != "cpu"
            stochastic = config.bf16_rounding == "stochastic"
            self.adam = CompactAdamW(parameters, coded=coded, offload=offload, stochastic=stochastic)
        # The schedules of torch want an optimizer: this one holds the rate, and moves nothing.
        holder = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
        self.schedule = make_schedule(holder, config, num_steps=num_steps, warmup_steps=warmup_steps)

    def _accumulate(self, index: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        total, accumulator = self._sums.get(index), self._accumulators.get(index)
        if total is not None:
            # `float` copies a first one that stayed as it was, and is the identity later.
            self._sums[index] = total.float().add_(gradient)
        else:  # a step of one micro-batch needs no float32 copy
            self._sums[index] = gradient if accumulator is None else accumulator.copy_(gradient)
        parameter.grad = None

    def reserve_accumulators(self, num_passes: int) -> None:
        """Allocate the sums of several backward passes before their activations: less fragmentation."""
        self._accumulators.clear()
        if num_passes < 2:
            return
        remaining = [(n, p) for n, p in enumerate(self.parameters) if p.dtype != torch.float32]
        while remaining:
            chosen, size = [], 0
            while remaining and (not chosen or size + remaining[0][1].numel() <= BLOCK_NUMEL):
                chosen.append(remaining.pop(0))
                size += chosen[-1][1].numel()
            block = torch.empty(size, dtype=torch.float32, device=chosen[0][1].device)
            pieces = block.split([parameter.numel() for _, parameter in chosen])
            self._accumulators |= {n: piece.view_as(p) for (n, p), piece in zip(chosen, pieces, strict=True)}

    @property
    def learning_rate(self) -> float:
        return self.schedule.get_last_lr()[0]

    def gradients(self) -> list[Tensor | None]:
        """This rank's part of every gradient: float32, or bf16 where one backward pass has left it so."""
        return [
            self._sums.get(index) if parameter.grad is None else local(parameter.grad)
            for index, parameter in enumerate(self.parameters)
        ]

    def gradient_norm(self) -> float:
        """The norm of the whole gradient, the parts of all ranks together."""
        pairs = [
            (norm_weight(parameter, self.ranks), gradient)
            for parameter, gradient in zip(self.parameters, self.gradients(), strict=True)
            if gradient is not None
        ]
        device = pairs[0][1].device if pairs else torch.device("cpu")
        total = torch.zeros((), dtype=torch.float64, device=device)
        if pairs:
            norms = torch.stack(_norms([gradient for _, gradient in pairs])).double()
            shares = torch.tensor([share for share, _ in pairs], dtype=torch.float64, device=device)
            total = (shares * norms.square()).sum()
        return all_reduce_ranks(self.ranks, total).sqrt().item()

    def step(self, norm: float) -> None:
        """Move the weights along gradients whose norm is `norm`."""
        limit, config = self.config.max_grad_norm, self.config
        clip = limit / (norm + 1e-6) if limit and norm > limit else 1.0
        settings = AdamWStep(
            rate=self.learning_rate,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            epsilon=config.adam_epsilon,
            weight_decay=config.weight_decay,
            clip=clip,
        )
        self.adam.step(self.gradients(), settings)

    def zero_grad(self) -> None:
        """Drop the gradients that were collected so far."""
        self._sums.clear()
        self._accumulators.clear()
        self.adam.zero_grad()
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self) -> None:
        """End the step, whether the weights moved or not: forget the gradients, advance the schedule."""
        self.zero_grad()
        with warnings.catch_warnings():  # the holder of the rate is never stepped
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.schedule.step()

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Moments and masters by the number of their parameter: float32, sharded as the parameter is."""
        return {
            str(index): {
                name: value if name == "step" else like(parameter, value)
                for name, value in self.adam.export(index).items()
            }
            for index, parameter in enumerate(self.parameters)
        }

    def load_state_tensors(self, state: dict[str, dict[str, Tensor]]) -> None:
        """`state` is `state_tensors()` of a checkpoint; weights are set to their masters."""
        for index in range(len(self.parameters)):
            self.adam.load(index, {name: local(value) for name, value in state[str(index)].items()})

    def state_scalars(self) -> dict[str, Any]:
        return self.schedule.state_dict()

    def load_state_scalars(self, scalars: dict[str, Any]) -> None:
        """Go on at the schedule's step, at the rate that the settings of now give there."""
        rates = self.schedule.base_lrs
        self.schedule.load_state_dict(scalars)
        self.schedule.base_lrs = rates
        step, factors = self.schedule.last_epoch, self.schedule.lr_lambdas
        self.schedule._last_lr = [rate * factor(step) for rate, factor in zip(rates, factors, strict=True)]


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """The norm of each, float32."""
    if gradients[0].device.type == "cpu":
        return [torch.linalg.vector_norm(gradient.float()) for gradient in gradients]
    norms: dict[int, Tensor] = {}
    for kind in {gradient.dtype for gradient in gradients}:  # a few launches, if all have the same dtype
        indices = [n for n, gradient in enumerate(gradients) if gradient.dtype == kind]
        values = torch._foreach_norm([gradients[n] for n in indices], 2, dtype=torch.float32)  # type: ignore[attr-defined]
        norms.update(zip(indices, values, strict=True))
    return [norms[n] for n in range(len(gradients))]


def make_schedule(
    adam: torch.optim.Optimizer, config: UpdateConfig, *, num_steps: int, warmup_steps: int
) -> Any:
    from transformers.optimization import get_scheduler
    from transformers.trainer_utils import SchedulerType

    kind = config.lr_scheduler_type
    # The others adapt to a metric at every step.
    known = [k.value for k in SchedulerType if k.value not in ("reduce_lr_on_plateau", "greedy")]
    if kind not in known:
        raise UserError(f"lr_scheduler_type '{kind}' can't be used: choose one of {', '.join(known)}.")
    try:
        schedule = get_scheduler(
            kind,
            adam,
            num_warmup_steps=warmup_steps,
            # Where all steps are warm-up: polynomial divides by the number of the others.
            num_training_steps=max(num_steps, warmup_steps + 1),
            scheduler_specific_kwargs=config.lr_scheduler_kwargs or None,
        )
        assert isinstance(schedule, LambdaLR)
        # An error is found now, not after a step whose work would be lost; the schedule ends at num_steps.
        rates = {f"step {n}": schedule.lr_lambdas[0](n) for n in (0, warmup_steps, num_steps - 1, num_steps)}
        if broken := non_finite(**rates):
            raise ValueError(f"the factor of the learning rate at {broken}")
    except (ValueError, TypeError, ArithmeticError) as error:
        raise UserError(
            f"lr_scheduler_type '{kind}' can't be used with these settings ({first_line(error)}): change "
            "lr_scheduler_kwargs, learning_rate or lr_scheduler_type."
        ) from None
    return schedule
