"""Completions as padded rows through a model's own forward pass: for models that can't be packed.

Slower than packing: every completion repeats its prompt, and short rows are padded to the longest. Padding
comes last, where a causal model does not see it, be it by attention, convolution or recurrence.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from whetstone.model.attention import index_rows


def padded_hidden(trunk: nn.Module, batch: Any) -> Tensor:
    """[N, H] hidden states that predict the completion tokens of a packed `update.packing.Batch`."""
    tokens = batch.token_ids
    completions = [segment for segment in batch.segments if segment.prefix_length]
    prompts = [tokens[s.prefix_start : s.prefix_start + s.prefix_length] for s in completions]
    rows = [
        torch.cat([prompt, tokens[s.start : s.start + s.length]])
        for prompt, s in zip(prompts, completions, strict=True)
    ]
    hidden = rows_hidden(trunk, rows or [tokens])  # without completions: a pass for nothing
    index = [torch.arange(0)]
    for number, segment in enumerate(completions):
        start = number * hidden.shape[1] + segment.prefix_length - 1  # predicts the first completion token
        index.append(torch.arange(start, start + segment.length))
    return index_rows(hidden.flatten(0, 1), torch.cat(index).to(hidden.device))


def rows_hidden(trunk: nn.Module, rows: list[Tensor]) -> Tensor:
    """[B, T, H] last hidden states of rows of tokens, padded at their ends."""
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    token_ids = pad_sequence(rows, batch_first=True)
    mask = torch.arange(token_ids.shape[1], device=token_ids.device) < lengths[:, None]
    return trunk(input_ids=token_ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
