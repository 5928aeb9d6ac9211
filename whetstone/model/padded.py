"""Completions as padded rows through a model's own forward pass: for models that can't be packed.

Slower than packing: every completion repeats its prompt, and short rows are padded to the longest. Padding
comes last, where a causal model does not see it, be it by attention, convolution or recurrence.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from whetstone.model.attention import index_rows
from whetstone.types import Segment


def padded_hidden(trunk: nn.Module, batch: Any) -> Tensor:
    """[N, H] hidden states that predict the completion tokens of a packed `update.packing.Batch`."""
    tokens = batch.token_ids
    rows = [index.to(tokens.device) for index in sequence_rows(batch.segments)]
    hidden = rows_hidden(trunk, [tokens[row] for row in rows])
    row_index = torch.zeros_like(tokens)  # where in [B * T] the hidden state of each token is
    for number, row in enumerate(rows):
        row_index[row] = number * hidden.shape[1] + torch.arange(len(row), device=tokens.device)
    return index_rows(hidden.flatten(0, 1), row_index[batch.logit_positions])


def sequence_rows(segments: Sequence[Segment]) -> list[Tensor]:
    """The tokens of whole sequences, which together have all tokens: a shared prompt is no row of its own."""
    rows: list[Tensor] = []
    seen: set[int] = set()
    for segment in reversed(segments):  # what shares a run comes behind it
        own = range(segment.start, segment.start + segment.length)
        if seen.issuperset(own):
            continue
        runs = (*segment.prefix, (segment.start, segment.length))
        rows.append(torch.cat([torch.arange(start, start + length) for start, length in runs]))
        seen.update(rows[-1].tolist())
    return rows[::-1]


def rows_hidden(trunk: nn.Module, rows: list[Tensor]) -> Tensor:
    """[B, T, H] last hidden states of rows of tokens, padded at their ends."""
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    token_ids = pad_sequence(rows, batch_first=True)
    mask = torch.arange(token_ids.shape[1], device=token_ids.device) < lengths[:, None]
    return trunk(input_ids=token_ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
