"""What an update computed for each token, by completion. It stays on the device until it is read."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whetstone.update.packing import Batch

# Of an update, in the order in which they are shown. A rule is true where it took a token out of the loss, or
# bounded its weight.
NUMBERS = ("logprob", "old_logprob", "sampler_logprob", "entropy", "advantage", "weight", "kl", "value")
RULES = ("clipped", "importance_bound", "off_policy", "low_entropy", "truncated_completion", "equal_rewards")


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """The tokens of one completion."""

    numbers: np.ndarray  # [NUMBERS, tokens] float32; NaN: not part of this run
    rules: np.ndarray  # [tokens] uint8, a bit for each of RULES


class TokenTable:
    """The newest update of every completion of a batch."""

    def __init__(self) -> None:
        self._parts: list[tuple[Batch, dict[str, Tensor]]] = []

    def clear(self) -> None:
        self._parts.clear()

    def add(self, batch: Batch, **columns: Tensor | None) -> None:
        """Columns [N] of a micro-batch, some of NUMBERS and RULES; nothing is copied."""
        self._parts.append((batch, {name: value for name, value in columns.items() if value is not None}))

    def rows(self, indices: Collection[int]) -> dict[int, TokenRows]:
        """By index among all completions of the step, those that were updated here."""
        rows = {}
        for batch, columns in self._parts:  # a later update of a completion replaces an earlier one
            ids = batch.batch_index.tolist()
            wanted = [number for number, index in enumerate(ids) if index in indices]
            if not wanted:
                continue
            owner = batch.sequence_ids
            keep = torch.isin(owner, torch.tensor(wanted, device=owner.device))
            missing = torch.full(owner.shape, torch.nan, device=owner.device)
            stacked = torch.stack([columns.get(name, missing).float()[keep] for name in NUMBERS])
            numbers = stacked.cpu().numpy()
            bits = torch.zeros_like(owner)
            for bit, name in enumerate(RULES):
                if name in columns:
                    bits += (columns[name] > 0).long() << bit
            rules = bits[keep].to(torch.uint8).cpu().numpy()
            owners = owner[keep].cpu().numpy()
            for number in wanted:  # tokens of a completion are adjacent
                start, stop = np.searchsorted(owners, (number, number + 1))
                rows[ids[number]] = TokenRows(numbers=numbers[:, start:stop], rules=rules[start:stop])
        return rows
