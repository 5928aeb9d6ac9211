"""Our attention, put into unchanged transformers models through their registered attention interface.

The caller of the model passes an object `attend`, and every layer calls it with its queries, keys and values:
`PackedAttention` for several sequences laid end to end (the update, and the engine's prefill); the native
engine has one of its own for decoding. No mask tensor over all tokens ever exists, and no token sees another
sequence.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "whetstone"


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """What a layer asks of its attention beside the tensors."""

    layer: int
    scale: float
    sliding_window: int | None
    softcap: float | None


class Attend(Protocol):
    """[B, heads, T, D] queries, keys and values -> [B, T, heads, D]."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor: ...


def _attention(module, query, key, value, attention_mask, *, attend: Attend, scaling: float, **kwargs):
    # Gemma passes softcap, and the sliding layers of several families sliding_window; the rest is of no
    # concern here.
    options = LayerOptions(
        layer=module.layer_idx,
        scale=scaling,
        sliding_window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
    )
    return attend(query, key, value, options), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)


class PackedAttention:
    """Causal attention inside each of several sequences laid end to end.

    On a GPU in half precision: torch's varlen flash attention. Elsewhere the sequences are laid side by side,
    padded at the end (where causality hides the padding) for SDPA, and taken apart again: linear layers never
    see padding.
    """

    def __init__(self, lengths: list[int], device: torch.device):
        self.lengths = lengths
        self.device = device
        self.max_length = max(lengths)
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        self.cu_seqlens = bounds.to(device=device, dtype=torch.int32)
        position = torch.arange(self.max_length)
        inside = position[None] < torch.tensor(lengths)[:, None]  # [S, L]
        # Padding repeats the first token: any token would do, since its result is dropped.
        self.pad_index = torch.where(inside, bounds[:-1, None] + position[None], 0).flatten().to(device)
        self.unpad_index = inside.flatten().nonzero().squeeze(1).to(device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and options.softcap is None:
            return self._varlen(query, key, value, options)
        query, key, value = (self._side_by_side(tensor) for tensor in (query, key, value))  # [S, heads, L, D]
        mask = _window_mask(self.max_length, options.sliding_window, query.device)
        if options.softcap is not None:
            out = softcapped(query, key, value, mask, options)
        else:
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=options.scale,
                enable_gqa=key.shape[1] != query.shape[1],
            )  # fmt: skip
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.unpad_index)[None]

    def _side_by_side(self, packed: Tensor) -> Tensor:
        rows = packed[0].transpose(0, 1).index_select(0, self.pad_index)  # [S*L, heads, D]
        return rows.view(len(self.lengths), self.max_length, *rows.shape[1:]).transpose(1, 2)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        groups = query.shape[1] // key.shape[1]
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, D]
        if groups > 1:  # torch 2.11 has no grouped heads here
            key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        window = -1 if options.sliding_window is None else options.sliding_window - 1
        return varlen_attn(
            query, key, value, self.cu_seqlens, self.cu_seqlens, self.max_length, self.max_length,
            scale=options.scale, window_size=(window, 0),
        )[None]  # fmt: skip


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """None where plain causality is all that is asked for."""
    if window is None or window >= length:
        return None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None]
    return (distance >= 0) & (distance < window)


def softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: LayerOptions
) -> Tensor:
    """Attention with scores bent by softcap * tanh(scores / softcap), which SDPA cannot do (Gemma 2)."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * options.scale
    scores = options.softcap * torch.tanh(scores / options.softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(value.dtype) @ value
