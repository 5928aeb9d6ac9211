"""AdamW with the schedule of transformers; half-precision weights train through float32 master copies.

At a learning rate of 1e-6 an update is far below the spacing of bf16 numbers: added to bf16 weights directly
it would be lost. So bf16 parameters keep a float32 master here; gradients are summed in float32 as they
appear, and the rounded master is copied back. Sharded parameters are float32 and their own masters: Adam
works on each rank's part, element by element. `offload` keeps masters and moments in the memory of the CPU.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from whetstone.config.rooms import UpdateRoom
from whetstone.errors import UserError
from whetstone.parallel.collectives import sum_of_all
from whetstone.parallel.fsdp import like, local, share_of
from whetstone.parallel.mesh import ALONE, Ranks


class Optimiser:
    """step() takes the gradients that backward() left, clips, moves the weights and the schedule."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        config: UpdateRoom,
        *,
        num_steps: int,
        warmup_steps: int,
        ranks: Ranks = ALONE,
        offload: bool = False,
    ):
        self.config = config
        self.ranks = ranks
        self.parameters = parameters
        self._sums: dict[int, Tensor] = {}  # float32 gradients of half-precision parameters
        for index, parameter in enumerate(parameters):
            if parameter.dtype != torch.float32:
                parameter.register_post_accumulate_grad_hook(self._sum_up(index))
        self.masters = [_master(parameter, offload) for parameter in parameters]
        self.adam = torch.optim.AdamW(
            self.masters,
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for (
            master
        ) in self.masters:  # at once, not at the first step, so that a checkpoint can be read into them
            zeros = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
            step = torch.zeros((), dtype=torch.float32, device=master.device)
            self.adam.state[master] = {"step": step, **zeros}
        self.schedule = make_schedule(self.adam, config, num_steps=num_steps, warmup_steps=warmup_steps)

    def _sum_up(self, index: int) -> Any:
        def move(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            before = self._sums.get(index)
            self._sums[index] = gradient.float() if before is None else before.add_(gradient)
            parameter.grad = None

        return move

    @property
    def learning_rate(self) -> float:
        return self.schedule.get_last_lr()[0]

    def gradients(self) -> list[Tensor | None]:
        """This rank's part of every gradient, float32."""
        return [
            self._sums.get(index) if parameter.grad is None else local(parameter.grad)
            for index, parameter in enumerate(self.parameters)
        ]

    def gradient_norm(self) -> float:
        """The norm of the whole gradient, the parts of all ranks together."""
        pairs = [
            (share_of(parameter, self.ranks), gradient)
            for parameter, gradient in zip(self.parameters, self.gradients(), strict=True)
            if gradient is not None
        ]
        device = pairs[0][1].device if pairs else torch.device("cpu")
        total = torch.zeros((), dtype=torch.float64, device=device)
        if pairs:
            norms = torch.stack([torch.linalg.vector_norm(gradient) for _, gradient in pairs]).double()
            shares = torch.tensor([share for share, _ in pairs], dtype=torch.float64, device=device)
            total = (shares * norms.square()).sum()
        return sum_of_all(self.ranks, total).sqrt().item()

    def step(self, norm: float) -> None:
        """Move the weights along gradients whose norm is `norm`."""
        limit = self.config.max_grad_norm
        clip = limit / (norm + 1e-6) if limit and norm > limit else None
        for master, gradient in zip(self.masters, self.gradients(), strict=True):
            if gradient is not None:
                if clip is not None:
                    gradient.mul_(clip)
                master.grad = gradient.to(master.device)
        self.adam.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if local(parameter).data_ptr() != master.data_ptr():
                    local(parameter).copy_(master)

    def forget(self) -> None:
        """Drop the gradients that were collected so far."""
        self._sums.clear()
        for tensor in (*self.masters, *self.parameters):
            tensor.grad = None

    def finish(self) -> None:
        """End the step, whether the weights moved or not: forget the gradients, advance the schedule."""
        self.forget()
        with warnings.catch_warnings():  # torch warns where a skipped first step has not moved the optimiser
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.schedule.step()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Moments and masters by the number of their parameter, spread as it is."""
        state: dict[str, dict[str, Tensor]] = {}
        for index, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            adam = self.adam.state[master]
            state[str(index)] = {
                "step": adam["step"],
                "exp_avg": like(parameter, adam["exp_avg"]),
                "exp_avg_sq": like(parameter, adam["exp_avg_sq"]),
                "master": like(parameter, master.detach()),
            }
        return state

    @torch.no_grad()
    def load_tensors(self) -> None:
        """Go on from what was read into `tensors()`: the weights follow their masters."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if local(parameter).data_ptr() != master.data_ptr():
                local(parameter).copy_(master)

    def numbers(self) -> dict[str, Any]:
        return self.schedule.state_dict()

    def load_numbers(self, numbers: dict[str, Any]) -> None:
        self.schedule.load_state_dict(numbers)
        for group, rate in zip(self.adam.param_groups, self.schedule.get_last_lr(), strict=True):
            group["lr"] = rate


def _master(parameter: nn.Parameter, offload: bool) -> Tensor:
    part = local(parameter.detach())
    if offload and part.device.type != "cpu":
        return part.float().cpu().pin_memory()
    if part.dtype == torch.float32:
        return parameter if local(parameter) is parameter else part
    return part.float()


def make_schedule(
    adam: torch.optim.Optimizer, config: UpdateRoom, *, num_steps: int, warmup_steps: int
) -> Any:
    from transformers.optimization import get_scheduler
    from transformers.trainer_utils import SchedulerType

    try:
        return get_scheduler(
            config.lr_scheduler_type,
            adam,
            num_warmup_steps=warmup_steps,
            num_training_steps=num_steps,
            scheduler_specific_kwargs=config.lr_scheduler_kwargs or None,
        )
    except ValueError:
        names = ", ".join(kind.value for kind in SchedulerType)
        raise UserError(
            f"lr_scheduler_type '{config.lr_scheduler_type}' can't be used: choose one of {names}."
        ) from None
    except TypeError as error:
        raise UserError(
            f"lr_scheduler_kwargs does not suit the schedule {config.lr_scheduler_type} ({error})."
        ) from None
