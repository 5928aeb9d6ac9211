"""How token losses become one number: a weight for every token, counted over the whole optimiser step before
any backward pass.

Because the weights are fixed first, the gradient does not depend on micro-batches, packing or the number of
devices.
"""

import torch
from torch import Tensor

from whetstone.algorithm.losses import LOSSES


def token_weights(
    lengths_S: Tensor,
    keep_S: Tensor,
    *,
    loss_type: str,
    max_length: int,
    num_sequences: float | None = None,
    num_tokens: float | None = None,
) -> Tensor:
    """The weight [S] that each token of a sequence carries; a sequence left out (keep 0) weighs nothing.

    By the loss's `average` in `LOSSES`. sequence (grpo, gspo, sapo): mean over the tokens of a sequence, then
    over sequences. token (bnpo, dapo, cispo, reinforce): mean over all tokens of the step. constant
    (dr_grpo): sum over tokens divided by sequences x max_length, so that length brings no bias. Where these
    sequences are only a part of the step, `num_sequences` and `num_tokens` (kept ones) count all of it.
    """
    lengths_S, keep_S = lengths_S.double(), keep_S.double()
    num_sequences = len(lengths_S) if num_sequences is None else num_sequences
    average = LOSSES[loss_type].average
    if average == "sequence":
        weights_S = 1 / (lengths_S.clamp(min=1) * num_sequences)
    elif average == "constant":
        weights_S = torch.full_like(lengths_S, 1 / (num_sequences * max_length))
    else:
        num_tokens = float((lengths_S * keep_S).sum()) if num_tokens is None else num_tokens
        weights_S = torch.full_like(lengths_S, 1 / max(1.0, num_tokens))
    return (weights_S * keep_S).float()
