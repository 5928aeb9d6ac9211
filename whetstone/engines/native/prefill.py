"""Prefill: packed sequences -> their keys and values in the pages."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain

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
from whetstone.model.shared_prefixes import PlacedPrompt, have_common_prefix, place_prompt, token_index
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
    """A packed batch of sequences. Tokens of a history are seen, not computed; a common prefix
    of prompts is computed once.
    """

    def __init__(self, state: PagedState, sequences: list[PrefillSequence]):
        device = state.shape.device
        self.state = state
        if have_common_prefix([sequence.prompt for sequence in sequences]):  # then those are neighbors
            sequences = sorted(sequences, key=lambda sequence: (sequence.adapter, sequence.prompt))
        placed = _segments_of(sequences)
        self.lengths = [segment.length for segment in placed]
        firsts = [segment.prefix_length for segment in placed]  # positions of the first computed tokens
        # By numpy: the device has nothing to do until these are there, and lists take milliseconds.
        tokens = chain.from_iterable(
            (*sequence.prompt, *sequence.generated)[first:]
            for sequence, first in zip(sequences, firsts, strict=True)
        )
        ids = np.fromiter(tokens, np.int64, sum(self.lengths))
        own = [np.split(sequence.cells(), [first]) for sequence, first in zip(sequences, firsts, strict=True)]
        cells = np.concatenate([new for _, new in own])
        positions = np.concatenate(
            [np.arange(first, first + length) for first, length in zip(firsts, self.lengths, strict=True)]
        )
        self.adapter_ids = np.repeat([sequence.adapter for sequence in sequences], self.lengths)
        self.cells, self.token_ids, self.position_ids = (
            upload(torch.from_numpy(numbers), device) for numbers in (cells, ids[None], positions[None])
        )
        self.packed = PackedAttention(placed, device)
        self.known_cells: Tensor | None = None
        if known := [number for number, sequence in enumerate(sequences) if sequence.num_known]:
            source = np.concatenate([sequences[number].known_cells() for number in known])
            self.known_cells = upload(torch.from_numpy(np.concatenate([own[n][0] for n in known])), device)
            self._copy(upload(torch.from_numpy(source), device), self.known_cells)
        self._shared: tuple[Tensor, Tensor] | None = None  # cells to copy when all are written
        sharing = [n for n, segment in enumerate(placed) if segment.prefix and not sequences[n].num_known]
        if sharing:
            source = cells[list(chain.from_iterable(token_index(placed[n].prefix) for n in sharing))]
            target = np.concatenate([own[n][0] for n in sharing])
            self._shared = (
                upload(torch.from_numpy(source), device),
                upload(torch.from_numpy(target), device),
            )

    @property
    def is_plain(self) -> bool:
        """Whether no sequence sees tokens that are elsewhere."""
        return self.known_cells is None and self._shared is None

    def finish(self) -> None:
        """After the pass: copy shared prefixes into the pages of all prompts that have them."""
        if self._shared is not None:
            self._copy(*self._shared)

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
        is_long = min(self.lengths) >= MIN_FLASH_TOKENS and self.is_plain
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


def _segments_of(sequences: list[PrefillSequence]) -> list[Segment]:
    """The computed tokens of every sequence, one after the other; known ones come after all of them."""
    segments: list[Segment] = []
    end, adapter = 0, 0
    previous: PlacedPrompt | None = None
    for sequence in sequences:
        if sequence.generated or sequence.num_known:
            segments.append(Segment(end, len(sequence)))
        else:
            # Another adapter makes other keys and values of the same tokens.
            previous = place_prompt(sequence.prompt, end, previous if sequence.adapter == adapter else None)
            adapter = sequence.adapter
            segments.append(previous.segment)
        end += segments[-1].length
    for number, sequence in enumerate(sequences):
        if sequence.num_known:
            segments[number] = segments[number]._replace(prefix=((end, sequence.num_known),))
            end += sequence.num_known
    return segments
