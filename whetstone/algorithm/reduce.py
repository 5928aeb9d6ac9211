"""Loss reduction: a weight per token, from counts over the whole optimizer step before any backward pass.

So the gradient does not depend on micro-batches, packing or the number of devices.
"""

import torch
from torch import Tensor

from whetstone.algorithm.losses import find_loss


def token_weights(
    lengths_S: Tensor,
    mask_S: Tensor,
    *,
    loss_type: str,
    max_length: int,
    num_sequences: float | None = None,
    num_tokens: float | None = None,
) -> Tensor:
    """The weight [S] of each token of a sequence, by the loss's `average`; 0 for a masked sequence.

    sequence (grpo, gspo, sapo): mean over the tokens of a sequence, then over sequences. token (bnpo, dapo,
    cispo, reinforce): mean over all tokens of the step. constant (dr_grpo): sum over tokens divided by
    sequences x max_length. `num_sequences` and `num_tokens` (unmasked) count the whole step, where these
    sequences are a part of it.
    """
    lengths_S, mask_S = lengths_S.double(), mask_S.double()
    num_sequences = len(lengths_S) if num_sequences is None else num_sequences
    average = find_loss(loss_type)[1].average
    if average == "sequence":
        weights_S = 1 / (lengths_S.clamp(min=1) * num_sequences)
    elif average == "constant":
        weights_S = torch.full_like(lengths_S, 1 / (num_sequences * max_length))
    else:
        num_tokens = float((lengths_S * mask_S).sum()) if num_tokens is None else num_tokens
        weights_S = torch.full_like(lengths_S, 1 / max(1.0, num_tokens))
    return (weights_S * mask_S).float()
