"""The slot KV cache of the CPU engine, and attention on it. Running sequences occupy slots 0 .. n-1."""

import torch
import torch.nn.functional as F
from torch import Tensor

from whetstone.engines.native.slot_state import CacheShape
from whetstone.model.attention import LayerOptions, PackedAttention, softcapped
from whetstone.model.shared_prefixes import PlacedPrompt, token_index


class SlotCache:
    def __init__(self, shape: CacheShape, num_slots: int, capacity: int):
        size = (shape.num_layers, num_slots, shape.num_heads, capacity, shape.head_dim)
        # Zeros, not empty: columns not written yet weigh 0, and 0 x NaN would still be NaN.
        self.keys = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self.values = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self.num_slots = num_slots
        self.capacity = capacity

    def move(self, source: int, target: int, length: int) -> None:
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]


class PrefillAttention:
    """Packed attention over prompts that writes their keys and values into the slots of all their samples."""

    def __init__(
        self, cache: SlotCache, prompts: list[PlacedPrompt], slots: list[list[int]], device: torch.device
    ):
        self.cache = cache
        self.packed = PackedAttention([prompt.segment for prompt in prompts], device)
        where = [
            (slot, position, token)
            for prompt, samples in zip(prompts, slots, strict=True)
            for slot in samples
            for position, token in enumerate(token_index(prompt.runs))
        ]
        self.slot, self.position, self.token = torch.tensor(where, device=device).unbind(1)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        self.cache.keys[options.layer, self.slot, :, self.position] = key[0].transpose(0, 1)[self.token]
        self.cache.values[options.layer, self.slot, :, self.position] = value[0].transpose(0, 1)[self.token]
        return self.packed(query, key, value, options)


class DecodeAttention:
    """One new token per slot against everything its slot holds."""

    def __init__(self, cache: SlotCache, positions: Tensor, longest: int):
        self.cache = cache
        self.positions = positions  # [n] of the new tokens
        self.slots = torch.arange(len(positions), device=positions.device)
        self.length = longest + 1
        columns = torch.arange(self.length, device=positions.device)
        self.distance = positions[:, None] - columns[None]  # [n, L]; negative: not written yet
        self.masks: dict[int | None, Tensor] = {}  # [n, 1, 1, L] by window: layers share them

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        keys, values = self.cache.keys[options.layer], self.cache.values[options.layer]
        keys[self.slots, :, self.positions] = key[:, :, 0]
        values[self.slots, :, self.positions] = value[:, :, 0]
        n, heads, _, dim = query.shape
        keys, values = keys[:n, :, : self.length], values[:n, :, : self.length]
        mask = self._mask(options.sliding_window)
        # Grouped heads as several queries of one head: keys and values are read once for all of them.
        query = query.view(n, keys.shape[1], heads // keys.shape[1], dim)
        if options.softcap is not None:
            out = softcapped(query, keys, values, mask, options)
        else:
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=options.scale)
        return out.reshape(n, 1, heads, dim)

    def _mask(self, window: int | None) -> Tensor:
        if window not in self.masks:
            visible = self.distance >= 0
            if window is not None:
                visible &= self.distance < window
            self.masks[window] = visible[:, None, None]
        return self.masks[window]
