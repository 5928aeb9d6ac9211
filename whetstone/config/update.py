"""The section of the update: how long, at which rate, by which optimizer, how much at once."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from whetstone.config.base import MAX_STEPS, Name, Resume, Section, accept


class UpdateConfig(Section):
    """How the weights move."""

    max_steps: Annotated[int, Resume.SAFE] = Field(default=-1, ge=-1, le=MAX_STEPS)
    """Optimizer steps of the whole run; -1: from num_train_epochs."""
    num_train_epochs: Annotated[float, Resume.SAFE] = Field(default=1.0, gt=0, le=1_000_000)
    """Passes over the training problems, where max_steps is -1."""
    sft_steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Supervised steps on the tasks' solutions before RL, as a run NAME_sft of its own (docs/sft.md)."""
    sft_learning_rate: float = Field(default=1e-5, ge=0, le=10)
    """Peak learning rate of these steps."""
    num_iterations: int = Field(default=1, ge=1, le=1_000)
    """Times each batch of completions is used."""
    learning_rate: float = Field(default=1e-6, ge=0, le=10)
    """Peak learning rate."""
    lr_scheduler_type: Name = "linear"
    """A schedule of transformers: linear, cosine, constant, constant_with_warmup, cosine_with_min_lr, ..."""
    lr_scheduler_kwargs: Annotated[dict[str, Any], accept({None: {}})] = Field(default_factory=dict)
    """Settings of that schedule, such as {min_lr_rate: 0.1}."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the steps over which the learning rate rises from 0."""
    warmup_steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    """The same as a number of steps; wins over warmup_ratio."""
    optim: Literal["adamw_torch", "adamw_8bit"] = "adamw_torch"
    """AdamW with float32 states, or with states of 8 bits: 6 bytes a parameter less (docs/update.md)."""
    bf16_rounding: Literal["nearest", "stochastic"] = "nearest"
    """How trained float32 weights become the bf16 ones that compute, on one GPU (docs/update.md)."""
    weight_decay: float = Field(default=0.0, ge=0, le=1_000)
    """AdamW's decoupled weight decay, of matrices; norms and biases have none, as in TRL."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the mean gradient."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's decay of the squared gradient."""
    adam_epsilon: float = Field(default=1e-8, ge=1e-30, le=1)
    """AdamW's floor in the denominator."""
    max_grad_norm: float = Field(default=1.0, ge=0, le=1_000_000_000)
    """Gradients are scaled down to this norm; 0: never."""
    micro_batch_tokens: Annotated[
        Annotated[int, Field(ge=1, le=16_777_216)] | Literal["auto"], Resume.SAFE
    ] = "auto"
    """Tokens of a forward and backward pass, prompts included. `auto`: what fits on every GPU; CPU: 8192."""
    skip_zero_advantages: bool = True
    """Leave completions of advantage 0 out of the update, where the gradient is the same (docs/update.md)."""
    max_skipped_steps: int = Field(default=3, ge=1, le=MAX_STEPS)
    """The run stops after so many steps in a row whose loss or gradient is not finite."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_steps == 0:
            raise ValueError(
                "max_steps is 0, which trains nothing: set eval_only=true to measure the model only, "
                "max_steps=1 to try the setup, or -1 for num_train_epochs"
            )
        return self
