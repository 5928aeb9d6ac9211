"""Our attention in unchanged transformers models, through their attention interface.

The caller of the model passes an object `attend`, and every layer calls it with its queries, keys and values:
`PackedAttention` for segments laid end to end, or the native engine's own for decoding. No mask over all
tokens ever exists, and no token sees another sequence.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from whetstone.model.flash import FlashPlan
from whetstone.model.tiled_attention import TilePlan
from whetstone.types import Segment

NAME = "whetstone"


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """What a layer asks of its attention beside the tensors."""

    layer: int
    scale: float
    sliding_window: int | None
    softcap: float | None


# [B, heads, T, D] queries, keys and values -> [B, T, heads, D].
AttentionFn = Callable[[Tensor, Tensor, Tensor, LayerOptions], Tensor]


def _attention(module, query, key, value, attention_mask, *, attend: AttentionFn, scaling: float, **kwargs):
    # Gemma passes softcap, and the sliding layers of several families sliding_window; the rest is of no
    # concern here.
    window, softcap = kwargs.get("sliding_window"), kwargs.get("softcap")
    plan = getattr(attend, "plan", None)
    if plan is not None and softcap is None and plan.fits(query, key, value, window):
        # A compiled layer is one graph around it.
        return plan.attend(query, key, value, scale=scaling, window=window), None
    return _uncompiled(module, query, key, value, attend, scaling, window, softcap), None


def _outside(module, query, key, value, attend: AttentionFn, scale, window, softcap) -> Tensor:
    """Between the compiled halves of a layer: lengths and segments would have it compiled for every batch."""
    options = LayerOptions(layer=module.layer_idx, scale=scale, sliding_window=window, softcap=softcap)
    return attend(query, key, value, options)


_uncompiled: Any = torch.compiler.disable(_outside)
ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)


def packed_segments(lengths: Sequence[int]) -> list[Segment]:
    """Whole sequences one after the other, nothing shared."""
    starts = [0, *itertools.accumulate(lengths)]
    return [Segment(start, length) for start, length in zip(starts, lengths, strict=False)]


def index_rows(rows: Tensor, index: Tensor) -> Tensor:
    """`rows[index]` whose gradient adds up in a fixed order, so that a run repeats bit for bit.

    Where an index occurs twice (a shared prompt), the backward pass of plain indexing adds with atomics on a
    CPU, in whatever order threads come; that of `index_select` does so on a GPU. Each where it is exact.
    """
    if rows.is_cuda:
        return rows[index]
    selected = rows.index_select(0, index.flatten())
    return selected if index.dim() == 1 else selected.view(*index.shape, *rows.shape[1:])


def uses_flash(device: torch.device, dtype: torch.dtype, softcap: float | None) -> bool:
    """Whether segments go through flash attention, unpadded."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and softcap is None


class PackedAttention:
    """Causal attention inside each of several segments laid end to end, which together cover all tokens.

    On a GPU in half precision: torch's flash attention (flash.py), or kernels of our own (tiled_attention.py)
    if `plan` says so. It is given for layers that are compiled. Elsewhere the segments are laid side by side,
    padded, for SDPA, and taken apart again: linear layers never see padding.
    """

    def __init__(
        self, segments: Sequence[Segment], device: torch.device, plan: FlashPlan | TilePlan | None = None
    ):
        self.segments = list(segments)
        self.device = device
        self._padded: tuple[list[_PaddedSegments], Tensor] | None = None  # and the way back to tokens
        self.plan = plan
        self._flash_plan = plan if isinstance(plan, FlashPlan) else None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        if uses_flash(query.device, query.dtype, options.softcap):
            self._flash_plan = self._flash_plan or FlashPlan(self.segments, self.device)
            self.plan = self.plan or self._flash_plan  # from here on layers go by it at once
            window = options.sliding_window
            return self._flash_plan.attend(query, key, value, scale=options.scale, window=window)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, D]
        self._padded = self._padded or self._pad_segments()
        buckets, order = self._padded
        out = torch.cat([bucket.attend(q, k, v, options) for bucket in buckets])
        return (index_rows(out, order) if len(buckets) > 1 else out)[None]

    def _pad_segments(self) -> tuple[list["_PaddedSegments"], Tensor]:
        alone = [segment for segment in self.segments if not segment.prefix]
        sharing = [segment for segment in self.segments if segment.prefix]
        by_length = [*bucket_by_length(alone), *bucket_by_length(sharing)]
        buckets = [_PaddedSegments(bucket, self.device) for bucket in by_length]
        return buckets, torch.cat([bucket.tokens for bucket in buckets]).argsort()


def bucket_by_length(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments at least half as long as the longest together: padding at most doubles the queries."""
    buckets: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda segment: -segment.length):
        if not buckets or 2 * segment.length < buckets[-1][0].length:
            buckets.append([])
        buckets[-1].append(segment)
    return [sorted(bucket, key=lambda segment: segment.start) for bucket in buckets]


def _spread(shape: torch.Size, total: int) -> Tensor:
    return torch.arange(shape.numel()).view(shape) % total


class _PaddedSegments:
    """Segments padded to one length each for queries and for keys, and back."""

    def __init__(self, segments: list[Segment], device: torch.device):
        sizes = [(segment.start, segment.length, segment.prefix_length) for segment in segments]
        starts, queries, prefixes = torch.tensor(sizes)[:, :, None].unbind(1)  # [S, 1] each
        column = torch.arange(int(queries.max()))[None]
        prefix_column = torch.arange(int(prefixes.max()))[None]
        inside, prefix_inside = column < queries, prefix_column < prefixes
        # Padding repeats tokens of the pack, which nobody sees there, each as rarely as can be: one that
        # occurs a thousand times makes a GPU's backward pass add a thousand zeros one after the other.
        total = int((starts + queries).max())
        own = torch.where(inside, starts + column, _spread(inside.shape, total))
        prefix = _spread(prefix_inside.shape, total)
        for row, segment in enumerate(segments):
            if segment.prefix:
                runs = [torch.arange(start, start + length) for start, length in segment.prefix]
                prefix[row, : segment.prefix_length] = torch.cat(runs)
        far = torch.iinfo(torch.long).max
        self.query_index = own.to(device)  # [S, Lq] which token
        self.key_index = torch.cat([prefix, own], 1).to(device)  # [S, Lk]
        # Padded queries see what the last real one sees: one that saw nothing would turn gradients into NaN.
        self.query_position = (prefixes + torch.minimum(column, queries - 1)).to(device)
        own_position = torch.where(inside, prefixes + column, far)
        prefix_position = torch.where(prefix_inside, prefix_column, far)
        self.key_position = torch.cat([prefix_position, own_position], 1).to(device)
        self.real = inside.flatten().nonzero().squeeze(1).to(device)
        self.tokens = own.flatten()[inside.flatten()].to(device)
        self.is_plain = not bool(prefixes.any())
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        query = index_rows(query, self.query_index).transpose(1, 2)  # [S, heads, Lq, D]
        key, value = (index_rows(tensor, self.key_index).transpose(1, 2) for tensor in (key, value))
        window = options.sliding_window
        causal = self.is_plain and (window is None or window >= query.shape[2])
        if options.softcap is not None:
            out = softcapped(query, key, value, self._mask(window), options)
        else:
            mask, gqa = None if causal else self._mask(window), key.shape[1] != query.shape[1]
            out = F.scaled_dot_product_attention(
                query, key, value, mask, is_causal=causal, scale=options.scale, enable_gqa=gqa
            )
        return index_rows(out.transpose(1, 2).flatten(0, 1), self.real)

    def _mask(self, window: int | None) -> Tensor:
        """[S, 1, Lq, Lk]: true where a key is seen. Keys that are padding lie infinitely far ahead."""
        if window not in self._masks:
            query, key = self.query_position[:, :, None], self.key_position[:, None]
            visible = key <= query
            if window is not None:
                visible &= query - key < window
            self._masks[window] = visible[:, None]
        return self._masks[window]


def softcapped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: LayerOptions) -> Tensor:
    """Attention with scores bent by softcap * tanh(scores / softcap), which SDPA cannot do (Gemma 2)."""
    assert options.softcap is not None
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * options.scale
    scores = options.softcap * torch.tanh(scores / options.softcap)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(value.dtype) @ value
