"""How token losses become one number: a weight for every token, counted over the whole optimiser step before
any backward pass.

Because the weights are fixed first, the gradient does not depend on micro-batches, packing or the number of
devices.
"""

import torch
from torch import Tensor

SEQUENCE_MEAN = ("grpo", "gspo", "sapo")
TOKEN_MEAN = ("bnpo", "dapo", "cispo", "reinforce")


def token_weights(lengths_S: Tensor, keep_S: Tensor, *, loss_type: str, max_length: int) -> Tensor:
    """The weight [S] that each token of a sequence carries; a sequence left out (keep 0) weighs nothing.

    grpo, gspo, sapo: mean over the tokens of a sequence, then over sequences. bnpo, dapo, cispo, reinforce:
    mean over all tokens of the step. dr_grpo: sum over tokens divided by a constant, sequences x max_length,
    so that length brings no bias.
    """
    lengths_S, keep_S = lengths_S.double(), keep_S.double()
    if loss_type in SEQUENCE_MEAN:
        weights_S = 1 / (lengths_S.clamp(min=1) * len(lengths_S))
    elif loss_type == "dr_grpo":
        weights_S = torch.full_like(lengths_S, 1 / (len(lengths_S) * max_length))
    else:
        assert loss_type in TOKEN_MEAN, loss_type
        weights_S = (1 / (lengths_S * keep_S).sum().clamp(min=1)).expand_as(lengths_S)
    return (weights_S * keep_S).float()
