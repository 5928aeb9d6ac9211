"""The knobs of the update: how long, at which rate, by which optimiser, how much at once."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from whetstone.config.base import Room


class UpdateRoom(Room):
    """How the weights move."""

    max_steps: int = -1
    """Optimiser steps of the whole run; -1: from num_train_epochs."""
    num_train_epochs: float = Field(default=1.0, gt=0)
    """Passes over the training problems, where max_steps is -1."""
    batch_counts_as_step: bool = False
    """Count accumulation steps, not optimiser steps, in max_steps and fixed_eval_steps."""
    num_iterations: int = Field(default=1, ge=1)
    """Times each batch of completions is used."""
    learning_rate: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    lr_scheduler_type: str = "linear"
    """A schedule of transformers: linear, cosine, constant, constant_with_warmup, polynomial,
    cosine_with_min_lr, ...
    """
    lr_scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of that schedule, such as {min_lr_rate: 0.1}."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the steps over which the learning rate rises from 0."""
    warmup_steps: int = Field(default=0, ge=0)
    """The same as a number of steps; wins over warmup_ratio."""
    optim: Literal["adamw_torch", "adamw_8bit"] = "adamw_torch"
    """AdamW with float32 states, or with states of 8 bits: 6 bytes a parameter less (docs/update.md)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the mean gradient."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's decay of the squared gradient."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's floor in the denominator."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this norm; 0: never."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Tokens (prompts included) in one packed forward and backward pass: the knob for memory. `auto`: as many
    as pay and fit, found at the start on a GPU (on several, what fits on each of them); 8192 elsewhere.
    """
    max_skipped_steps: int = Field(default=3, ge=1)
    """The run stops after so many steps in a row whose loss or gradient is not finite."""

    @field_validator("lr_scheduler_kwargs", mode="before")
    @classmethod
    def _none_is_empty(cls, value: Any) -> Any:
        return {} if value is None else value
