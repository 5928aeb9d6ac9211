"""Device state of the native engine on a GPU: a column of integers and a page table per slot, and the pages.

Everything has a fixed address, which CUDA graphs read. Only the pages are allocated and freed between
rollouts, so their address is itself stored on the device (`bases`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from whetstone.engines.base import SamplingParams
from whetstone.model.attention import LayerOptions

PAGE = 64  # tokens in a page: also the tile of the attention kernel

# Rows of `PagedState.slots`.
ACTIVE = 0  # 1 while the sequence in this slot is unfinished
PROMPT_LEN = 1  # without the last token; in pages shared with its group
NUM_CACHED = 2  # tokens whose keys and values are in its own pages
NUM_GENERATED = 3  # tokens sampled so far
MAX_NEW = 4  # tokens it may generate
TOKEN = 5  # the newest token, to be fed next
NUM_FIELDS = 6
# Rows of `PagedState.settings`.
TEMPERATURE, TOP_P, MIN_P, TOP_K = 0, 1, 2, 3
USES_STOPS = 4  # 0: stop tokens do not end the sequence
NUM_SETTINGS = 5

MAX_STOPS = 32


def active_slot(prompt_len: int, num_generated: int, max_new: int, token: int) -> list[int]:
    """The column of a sequence: as many tokens are cached as generated, since the newest is fed next."""
    return [1, prompt_len, num_generated, num_generated, max_new, token]


def slot_settings(sampling: SamplingParams) -> list[float]:
    """The column of a sequence in `PagedState.settings`."""
    return [*sampling.distribution, float(not sampling.ignore_eos)]


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    num_layers: int
    num_heads: int  # of keys and values
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """Attention parameters of a layer. `rotary` and `head_norms` are None where the model applies them."""

    options: LayerOptions
    heads: int
    kv_heads: int
    head_dim: int
    rotary: tuple[Tensor, Tensor] | None = None  # cosines and sines [positions, head_dim / 2]
    head_norms: tuple[Tensor, Tensor] | None = None  # weights of the norms of queries and keys
    norm_offset: float = 0.0  # 1 where a norm's weight is stored as its difference from 1
    norm_eps: float = 0.0


class PagedState:
    """The tensors that graphs read and write."""

    def __init__(self, shape: CacheShape, num_slots: int, table_width: int, max_tokens: int):
        device = shape.device
        self.shape, self.num_slots, self.max_tokens = shape, num_slots, max_tokens
        self.dtype = shape.dtype
        self.slots = torch.zeros(NUM_FIELDS, num_slots, dtype=torch.int32, device=device)
        self.table = torch.zeros(num_slots, table_width, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.out_tokens = torch.zeros(num_slots, max_tokens, dtype=torch.int32, device=device)
        self.out_logprobs = torch.zeros(num_slots, max_tokens, dtype=torch.float32, device=device)
        self.rows = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        self.settings = torch.zeros(NUM_SETTINGS, num_slots, dtype=torch.float32, device=device)
        self.adapters = torch.zeros(num_slots, dtype=torch.int32, device=device)  # by number; 0: none
        self.stops = torch.full((MAX_STOPS,), -1, dtype=torch.int32, device=device)
        self.bases = torch.zeros(3, dtype=torch.int64, device=device)
        self.pages: Tensor | None = None  # [2, layers, pages, heads, PAGE, D]

    @property
    def num_pages(self) -> int:
        return 0 if self.pages is None else self.pages.shape[2]

    def allocate_pages(self, num_pages: int) -> None:
        shape = self.shape
        self.pages = None
        size = (2, shape.num_layers, num_pages, shape.num_heads, PAGE, shape.head_dim)
        self.pages = torch.empty(size, dtype=shape.dtype, device=shape.device)
        keys, values = self.pages[0], self.pages[1]
        self.bases.copy_(torch.tensor([keys.data_ptr(), values.data_ptr(), keys[0].numel()]))

    def release_pages(self) -> None:
        self.pages = None
        self.bases.zero_()
