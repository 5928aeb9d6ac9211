"""The table of policy losses. A loss is one record here and its function in algorithm/losses.py."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator

from whetstone.config.plugins import is_plugin

AVERAGES = ("sequence", "token", "constant")
RATIO_LEVELS = ("token", "sequence")


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Everything about a policy loss that depends on its name."""

    function: str  # in algorithm/losses.py
    # sequence: mean over the tokens of a sequence, then over sequences. token: mean over all tokens of the
    # step. constant: sum over tokens, divided by sequences x max_completion_length.
    average: Literal["sequence", "token", "constant"]
    ratio: Literal["token", "sequence"] | None = None  # None: importance_sampling_level
    supervised: bool = False  # imitates solutions: no advantages, no sampling logprobs
    bounds_weight: bool = False  # epsilon_high bounds the importance weight itself, not weight - 1


LOSSES: dict[str, Loss] = {
    "grpo": Loss(function="clipped_surrogate", average="sequence"),
    "bnpo": Loss(function="clipped_surrogate", average="token"),
    "dr_grpo": Loss(function="clipped_surrogate", average="constant"),
    "dapo": Loss(function="clipped_surrogate", average="token"),
    "cispo": Loss(function="cispo", average="token", bounds_weight=True),
    "gspo": Loss(function="clipped_surrogate", average="sequence", ratio="sequence"),
    "sapo": Loss(function="sapo", average="sequence"),
    "reinforce": Loss(function="reinforce", average="token"),
    "sft": Loss(function="negative_log_likelihood", average="token", supervised=True),
}


def _check_name(loss_type: str) -> str:
    if loss_type not in LOSSES and not is_plugin(loss_type):
        names = ", ".join(f"'{name}'" for name in LOSSES)
        raise ValueError(f"choose one of {names}, or your own function: my_loss.py:my_function")
    return loss_type


if TYPE_CHECKING:
    LossType = str
else:
    LossType = Annotated[Literal[tuple(LOSSES)] | str, AfterValidator(_check_name)]
