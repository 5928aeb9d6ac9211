"""Prefill: packed sequences -> their keys and values in the pages."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from whetstone.engines.native.scheduler import History
from whetstone.engines.native.slot_state import PAGE, PagedState
from whetstone.model.adapters import AdapterSelection
from whetstone.model.attention import LayerOptions, PackedAttention
from whetstone.model.memory import upload
from whetstone.types import Segment

MIN_FLASH_TOKENS = 2048  # from here one call of cuDNN attention per sequence is faster (Hopper)


@dataclass(frozen=True)
class PrefillSequence:
    """Tokens and their pages; no pages: they are cached already."""

    prompt: tuple[int, ...]
    prompt_pages: list[int]
    generated: list[int]
    generated_pages: list[int]
    adapter: int = 0
    history: History | None = None  # where its first tokens are cached; they are copied to its own pages

    def __len__(self) -> int:
        """Tokens to compute."""
        return len(self.prompt) + len(self.generated) - self.num_known

    @property
    def num_known(self) -> int:
        return 0 if self.history is None else len(self.history)

    def cells(self) -> np.ndarray:
        """The cell of every token: page * PAGE + offset, or -1."""
        parts = (self.prompt, self.prompt_pages), (self.generated, self.generated_pages)
        return np.concatenate([_cells(pages, len(tokens)) for tokens, pages in parts])

    def known_cells(self) -> np.ndarray:
        """Where the tokens of its history are."""
        history = self.history
        if history is None:
            return _cells([], 0)
        parts = (history.prompt_pages, history.prompt_length), (history.pages, history.length)
        return np.concatenate([_cells(pages, length) for pages, length in parts])


def _cells(pages: list[int], length: int) -> np.ndarray:
    if not pages:
        return np.full(length, -1)
    return (np.array(pages)[:, None] * PAGE + np.arange(PAGE)).ravel()[:length]


class PagedPrefill:
    """A packed batch of sequences. Tokens of a history are seen, not computed."""

    def __init__(self, state: PagedState, sequences: list[PrefillSequence]):
        device = state.shape.device
        self.state = state
        self.lengths = [len(sequence) for sequence in sequences]
        known = [sequence.num_known for sequence in sequences]
        # By numpy: the device has nothing to do until these are there, and lists take milliseconds.
        tokens = chain.from_iterable(
            (*sequence.prompt, *sequence.generated)[start:]
            for sequence, start in zip(sequences, known, strict=True)
        )
        ids = np.fromiter(tokens, np.int64, sum(self.lengths))
        own = [np.split(sequence.cells(), [start]) for sequence, start in zip(sequences, known, strict=True)]
        cells = np.concatenate([new for _, new in own])
        positions = np.concatenate(
            [np.arange(start, start + length) for start, length in zip(known, self.lengths, strict=True)]
        )
        self.adapter_ids = np.repeat([sequence.adapter for sequence in sequences], self.lengths)
        self.cells, self.token_ids, self.position_ids = (
            upload(torch.from_numpy(numbers), device) for numbers in (cells, ids[None], positions[None])
        )
        self.packed = PackedAttention(_segments(self.lengths, known), device)
        self.known_cells: Tensor | None = None
        if any(known):
            source = np.concatenate([sequence.known_cells() for sequence in sequences])
            self.known_cells = upload(torch.from_numpy(np.concatenate([old for old, _ in own])), device)
            self._copy(upload(torch.from_numpy(source), device), self.known_cells)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        pages = self.state.pages
        assert pages is not None
        for layer in range(pages.shape[1]):  # one by one: a copy of all layers would take gigabytes
            rows = pages[:, layer, source // PAGE, :, source % PAGE]
            pages[:, layer, target // PAGE, :, target % PAGE] = rows

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
        return self.packed(query, *self._with_known(key, value, options.layer), options)

    def _with_known(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """[1, kv_heads, T, D] keys and values, and after them those of the histories."""
        if self.known_cells is None:
            return key, value
        pages, cells = self.state.pages, self.known_cells
        assert pages is not None
        known = pages[:, layer, cells // PAGE, :, cells % PAGE]  # [K, 2, kv_heads, D]
        known_key, known_value = known.permute(1, 2, 0, 3).unbind(0)
        return torch.cat([key, known_key[None]], 2), torch.cat([value, known_value[None]], 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        """[T, heads, D] queries, [T, kv_heads, D] keys and values -> [T, heads * D]."""
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        is_plain = options.softcap is None and options.sliding_window is None
        is_half = query.is_cuda and query.dtype != torch.float32
        is_long = min(self.lengths) >= MIN_FLASH_TOKENS and self.known_cells is None
        if not (is_plain and is_half and is_long):
            keys_values = self._with_known(key, value, options.layer)
            return self.packed(query, *keys_values, options)[0].flatten(1)
        sequences = zip(*(t.split(self.lengths, dim=2) for t in (query, key, value)), strict=True)
        gqa = key.shape[1] != query.shape[1]
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            outs = [
                F.scaled_dot_product_attention(*qkv, is_causal=True, scale=options.scale, enable_gqa=gqa)
                for qkv in sequences
            ]
        return torch.cat(outs, dim=2)[0].transpose(0, 1).flatten(1)


def _segments(lengths: Sequence[int], known: Sequence[int]) -> list[Segment]:
    """The computed tokens of every sequence, one after the other; the known ones come after all of them."""
    starts, known_starts = accumulate(lengths, initial=0), accumulate(known, initial=sum(lengths))
    return [
        Segment(start, length, ((known_start, num_known),) if num_known else ())
        for start, length, known_start, num_known in zip(starts, lengths, known_starts, known, strict=False)
    ]
