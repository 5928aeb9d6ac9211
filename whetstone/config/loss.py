"""The section of the algorithm: losses, advantages, KL, masks, critic. docs/losses.md has the formulas."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from whetstone.config.base import MAX_COUNT, MAX_STEPS, Section, accept
from whetstone.config.losses import LOSSES, LossType


class LossConfig(Section):
    """The algorithm."""

    loss_type: LossType = "dapo"
    """The policy loss and its averaging (docs/losses.md), or your own: my_loss.py:function."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or of the whole sequence (which gspo means)."""
    advantage: Literal["group", "rloo", "reinforce_pp", "gae"] = "group"
    """The baseline: mean of the group, of the others in it, of the batch (and its spread), or a critic."""
    scale_rewards: Annotated[Literal["group", "batch", "none"], accept({True: "group", False: "none"})] = (
        "group"
    )
    """Divide advantages by the standard deviation of the group (true), of the batch, or not (false)."""
    epsilon: float = Field(default=0.2, ge=0, le=1_000)
    """The ratio is clipped below at 1 - epsilon."""
    epsilon_high: float | None = Field(default=None, ge=0, le=1_000)
    """The ratio is clipped above at 1 + this; default: epsilon. cispo: the largest weight; default: 5."""
    delta: float | None = Field(default=None, gt=0, le=1_000)
    """Upper bound of the ratio where the advantage is negative (two-sided clip); above 1 + epsilon_high."""
    sapo_temperature_pos: float = Field(default=1.0, ge=1e-6, le=1_000)
    """How sharply sapo's gate closes for good answers."""
    sapo_temperature_neg: float = Field(default=1.05, ge=1e-6, le=1_000)
    """How sharply sapo's gate closes for bad answers."""
    beta: float = Field(default=0.0, ge=0, le=1_000)
    """Weight of the KL penalty; 0: no reference is kept."""
    kl_reference: Literal["base", "moving", "rollout"] = "base"
    """Reference of the KL: initial weights, moving average, or the policy that sampled (per update)."""
    kl_estimator: Literal["k1", "k2", "k3", "full"] = "k3"
    """KL from the sampled tokens (k1, k2, k3) or over the vocabulary (full: tokens x vocabulary numbers)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the penalty goes: into the loss, or off the reward before advantages are taken."""
    target_kl: float | None = Field(default=None, gt=0, le=1_000)
    """Let beta grow and shrink so that the KL per token stays near this; none: beta is fixed."""
    ref_model_sync_steps: int = Field(default=512, ge=1, le=MAX_STEPS)
    """kl_reference moving: the reference follows every so many steps."""
    ref_model_mixup_alpha: float = Field(default=0.6, gt=0, le=1)
    """kl_reference moving: how much of the policy the reference takes over then."""
    use_bias_correction_kl: bool = True
    """Multiply the KL in the loss by the ratio, as TRL does. It changes the gradient on-policy, too."""
    entropy_coef: float = Field(default=0.0, ge=-1_000, le=1_000)
    """Bonus on the mean entropy per token."""
    entropy_target: float | None = Field(default=None, gt=0, le=100)
    """Adapt entropy_coef by 0.005 a step to keep the entropy above this; no bonus above it."""
    entropy_coef_max: float = Field(default=1.0, ge=0, le=1_000)
    """Upper bound of the adaptive entropy_coef."""
    top_entropy_quantile: float = Field(default=1.0, gt=0, le=1)
    """Train only on this fraction of a step's tokens, those of the highest entropy."""
    mask_truncated_completions: bool = False
    """Leave completions that were cut off at max_completion_length out of the loss."""
    off_policy_mask_threshold: float | None = Field(default=None, gt=0, le=1_000)
    """Leave out sequences with negative advantage whose mean logprob fell by more since sampling."""
    importance_correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "none"
    """Importance weights for engine against trainer logprobs; with async_rollouts: token_truncate."""
    importance_correction_min: float = Field(default=0.0, ge=0, le=MAX_COUNT)
    """Lower bound of these weights."""
    importance_correction_max: float = Field(default=3.0, gt=0, le=MAX_COUNT)
    """Upper bound of these weights; beyond the bounds a weight is cut (truncate) or becomes 0 (mask)."""

    @property
    def upper_epsilon(self) -> float:
        """epsilon_high with its default."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return 5.0 if self._bounds_weight else self.epsilon

    @property
    def is_supervised(self) -> bool:
        """Whether it imitates solutions instead of reinforcing samples."""
        return self.loss_type in LOSSES and LOSSES[self.loss_type].supervised

    @property
    def _bounds_weight(self) -> bool:
        return self.loss_type in LOSSES and LOSSES[self.loss_type].bounds_weight

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self._bounds_weight and self.upper_epsilon < 1:
            raise ValueError(
                f"epsilon_high is {self.upper_epsilon}, but {self.loss_type} takes it for the largest weight "
                "itself, which must be at least 1: set it to 5 or so"
            )
        if self.target_kl is not None and self.beta == 0:
            raise ValueError("target_kl adapts beta, which is 0: give it a first value, such as beta: 0.01")
        if self.kl_in == "reward" and self.kl_estimator == "full":
            raise ValueError("kl_in: reward needs one number per token: set kl_estimator to k1, k2 or k3")
        low, high = self.importance_correction_min, self.importance_correction_max
        if low > high:
            raise ValueError(
                f"importance_correction_min ({low:g}) is above importance_correction_max ({high:g}): lower it"
            )
        bound = 1 + self.upper_epsilon
        if self.delta is not None and self.delta <= bound and not self._bounds_weight:
            raise ValueError(f"delta is {self.delta}, but must exceed 1 + epsilon_high = {bound:g}")
        return self


class CriticConfig(Section):
    """The value model beside the policy, where `advantage` is gae."""

    critic: Literal["head", "model"] = "head"
    """A linear layer on the policy's own hidden states, or a model of its own begun as the policy's copy."""
    critic_learning_rate: float = Field(default=1e-5, ge=0, le=10)
    """Learning rate of the critic, constant after its warm-up."""
    critic_warmup_steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    """First steps in which only the critic learns."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """1: whole returns (no bias, much noise); 0: one step ahead (the critic's bias, little noise)."""
    value_clip: float | None = Field(default=0.2, gt=0, le=1_000)
    """Hold new values this near to the old ones within a batch; none: free."""
    value_coef: float = Field(default=0.1, ge=0, le=1_000)
    """Weight of the value loss in the gradient of a trunk that policy and critic share."""
