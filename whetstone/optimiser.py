"""AdamW with the schedule of transformers; half-precision weights train through float32 master copies.

At a learning rate of 1e-6 an update is far below the spacing of bf16 numbers: added to bf16 weights directly
it would be lost. So bf16 parameters keep a float32 master here; gradients are summed in float32 as they
appear, and the rounded master is copied back.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from whetstone.config.rooms import UpdateRoom
from whetstone.errors import UserError


class Optimiser:
    """step() takes the gradients that backward() left, clips, moves the weights and the schedule."""

    def __init__(
        self, parameters: list[nn.Parameter], config: UpdateRoom, *, num_steps: int, warmup_steps: int
    ):
        self.config = config
        self.parameters = parameters
        self.masters = [self._master(parameter) for parameter in parameters]
        self.adam = torch.optim.AdamW(
            self.masters,
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.schedule = make_schedule(self.adam, config, num_steps=num_steps, warmup_steps=warmup_steps)

    def _master(self, parameter: nn.Parameter) -> Tensor:
        if parameter.dtype == torch.float32:
            return parameter
        master = parameter.detach().float()

        def move_gradient(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(move_gradient)
        return master

    @property
    def learning_rate(self) -> float:
        return self.schedule.get_last_lr()[0]

    def gradient_norm(self) -> float:
        gradients = [master.grad for master in self.masters if master.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0

    def step(self, norm: float) -> None:
        """Move the weights along gradients whose norm is `norm`."""
        limit = self.config.max_grad_norm
        if limit and norm > limit:
            for master in self.masters:
                if master.grad is not None:
                    master.grad.mul_(limit / (norm + 1e-6))
        self.adam.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter is not master:
                    parameter.copy_(master)

    def finish(self) -> None:
        """End the step, whether the weights moved or not: forget the gradients, advance the schedule."""
        for master in self.masters:
            master.grad = None
        with warnings.catch_warnings():  # torch warns where a skipped first step has not moved the optimiser
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.schedule.step()

    def state(self) -> dict[str, Any]:
        masters = {
            i: m for i, (p, m) in enumerate(zip(self.parameters, self.masters, strict=True)) if p is not m
        }
        return {"adam": self.adam.state_dict(), "schedule": self.schedule.state_dict(), "masters": masters}

    def load_state(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        self.schedule.load_state_dict(state["schedule"])
        with torch.no_grad():
            for index, master in state["masters"].items():
                self.masters[index].copy_(master)


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
