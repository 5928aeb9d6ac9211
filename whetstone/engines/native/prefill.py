"""Sequences -> their keys and values in pages: packed prompts through the model's own modules.

A sequence may continue into pages of its own (a sample that was sent back and comes again), and its prompt
may be in the cache already: then only the rest is written.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from whetstone.engines.native.layout import PAGE, PagedState
from whetstone.model.attention import LayerOptions, PackedAttention, end_to_end


@dataclass(frozen=True)
class Sequence:
    """Tokens and the pages they go to; no pages: they are there already."""

    prompt: tuple[int, ...]
    prompt_pages: list[int]
    own: list[int]
    own_pages: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.own)

    def places(self) -> tuple[list[int], list[int]]:
        """Numbers of the tokens that are to be written, and where: page * PAGE + offset."""
        tokens: list[int] = []
        where: list[int] = []
        for first, count, pages in (
            (0, len(self.prompt), self.prompt_pages),
            (len(self.prompt), len(self.own), self.own_pages),
        ):
            if pages:
                tokens.extend(range(first, first + count))
                where.extend(pages[n // PAGE] * PAGE + n % PAGE for n in range(count))
        return tokens, where


class PagedPrefill:
    """The attention of packed sequences, which also writes their keys and values into the pages."""

    def __init__(self, state: PagedState, sequences: list[Sequence]):
        device = state.shape.device
        self.state = state
        lengths = [len(sequence) for sequence in sequences]
        self.packed = PackedAttention(end_to_end(lengths), device)
        tokens: list[int] = []
        where: list[int] = []
        start = 0
        for sequence, length in zip(sequences, lengths, strict=True):
            numbers, places = sequence.places()
            tokens.extend(start + number for number in numbers)
            where.extend(places)
            start += length
        self.tokens = torch.tensor(tokens).to(device)
        places = torch.tensor(where).to(device)
        self.page, self.offset = places // PAGE, places % PAGE
        ids = [token for sequence in sequences for token in (*sequence.prompt, *sequence.own)]
        self.token_ids = torch.tensor(ids).to(device)[None]
        self.position_ids = torch.cat([torch.arange(length) for length in lengths]).to(device)[None]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        pages = self.state.pages
        assert pages is not None
        for number, tensor in enumerate((key, value)):
            rows = tensor[0].transpose(0, 1)[self.tokens]  # [T, heads, D]
            pages[number, options.layer, self.page, :, self.offset] = rows
        return self.packed(query, key, value, options)
