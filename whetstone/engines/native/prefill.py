"""Prefill: packed sequences -> their keys and values in the pages."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from whetstone.engines.native.slot_state import PAGE, PagedState
from whetstone.model.adapters import AdapterSelection
from whetstone.model.attention import LayerOptions, PackedAttention, packed_segments
from whetstone.model.memory import upload

MIN_FLASH_TOKENS = 2048  # from here one call of cuDNN attention per sequence is faster (Hopper)


@dataclass(frozen=True)
class PrefillSequence:
    """Tokens and their pages; no pages: they are cached already."""

    prompt: tuple[int, ...]
    prompt_pages: list[int]
    generated: list[int]
    generated_pages: list[int]
    adapter: int = 0

    def __len__(self) -> int:
        return len(self.prompt) + len(self.generated)

    def cells(self) -> np.ndarray:
        """The cell of every token: page * PAGE + offset, or -1."""
        cells = np.full(len(self), -1)
        prompt, generated = np.split(cells, [len(self.prompt)])  # views
        for part, pages in ((prompt, self.prompt_pages), (generated, self.generated_pages)):
            if pages:
                part[:] = (np.array(pages)[:, None] * PAGE + np.arange(PAGE)).ravel()[: len(part)]
        return cells


class PagedPrefill:
    """A packed batch of sequences."""

    def __init__(self, state: PagedState, sequences: list[PrefillSequence]):
        device = state.shape.device
        self.state = state
        self.lengths = [len(sequence) for sequence in sequences]
        self.packed = PackedAttention(packed_segments(self.lengths), device)
        # By numpy: the device has nothing to do until these are there, and lists take milliseconds.
        tokens = chain.from_iterable((*sequence.prompt, *sequence.generated) for sequence in sequences)
        ids = np.fromiter(tokens, np.int64, sum(self.lengths))
        cells = np.concatenate([sequence.cells() for sequence in sequences])
        positions = np.concatenate([np.arange(length) for length in self.lengths])
        self.adapter_ids = np.repeat([sequence.adapter for sequence in sequences], self.lengths)
        self.cells, self.token_ids, self.position_ids = (
            upload(torch.from_numpy(numbers), device) for numbers in (cells, ids[None], positions[None])
        )

    def selecting(self, adapters: AdapterSelection | None) -> AbstractContextManager[None]:
        """Inside, the layers apply the adapter of each sequence."""
        if adapters is None:
            return nullcontext()
        return adapters.rows(upload(torch.from_numpy(self.adapter_ids), self.state.shape.device))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        """As a layer of a transformers model calls it, with queries and keys rotated already."""
        pages = self.state.pages
        assert pages is not None
        written = self.cells >= 0
        cells = self.cells[written]
        for number, tensor in enumerate((key, value)):
            rows = tensor[0].transpose(0, 1)[written]  # [T, heads, D]
            pages[number, options.layer, cells // PAGE, :, cells % PAGE] = rows
        return self.packed(query, key, value, options)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        """[T, heads, D] queries, [T, kv_heads, D] keys and values -> [T, heads * D]."""
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        is_plain = options.softcap is None and options.sliding_window is None
        is_half = query.is_cuda and query.dtype != torch.float32
        if not (is_plain and is_half and min(self.lengths) >= MIN_FLASH_TOKENS):
            return self.packed(query, key, value, options)[0].flatten(1)
        sequences = zip(*(t.split(self.lengths, dim=2) for t in (query, key, value)), strict=True)
        gqa = key.shape[1] != query.shape[1]
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            outs = [
                F.scaled_dot_product_attention(*qkv, is_causal=True, scale=options.scale, enable_gqa=gqa)
                for qkv in sequences
            ]
        return torch.cat(outs, dim=2)[0].transpose(0, 1).flatten(1)
