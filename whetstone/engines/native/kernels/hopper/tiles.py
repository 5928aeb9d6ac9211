"""What the products that are written for Hopper chips (gated.cu, linear.cu) share: which matrices their
tiles can be fetched from, and how they are compiled.
"""

import logging
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from whetstone.engines.native.kernels.hopper.attention import WARP
from whetstone.engines.native.kernels.hopper.nvrtc import Kernel, Unavailable, compile_source

logger = logging.getLogger("whetstone")

HOPPER = Path(__file__).with_name("hopper.cuh")
CAPABILITY, ARCHITECTURE = (9, 0), "sm_90a"  # its instructions are this chip's and no other's
DEPTH, LINE = 64, 128  # numbers of a row in a stage, and their bytes
MOST_SHARED = 232_448  # bytes of a block


class Tile(Protocol):
    """What a kernel is compiled for."""

    @property
    def columns(self) -> int: ...
    @property
    def bf16(self) -> bool: ...
    @property
    def shared_bytes(self) -> int: ...
    def macros(self) -> list[str]: ...


def can_fetch(x: Tensor, weight: Tensor) -> bool:
    """Whether this is such a chip, and rows of [n, K] and [N, K] begin where it can fetch them from."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.dtype == weight.dtype
        and x.is_contiguous()
        and weight.is_contiguous()
        and len(weight) % 8 == 0
        and x.shape[1] % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
        and torch.cuda.get_device_capability(x.device) == CAPABILITY
    )


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def rows_of_part(rows: int, parts: int) -> int:
    """Rows of each part, where all have the same: a multiple of eight, as tiles are laid out."""
    return 8 * -(-rows // (8 * parts))


def compiled(source: Path, name: str, tile: Tile, device: torch.device) -> Kernel | None:
    """The kernel `name` of `source`; None if it can't be had here."""
    words = WARP.read_text() + HOPPER.read_text() + _multiply_tile(tile.columns, tile.bf16)
    try:
        binary = compile_source(words + source.read_text(), tile.macros(), ARCHITECTURE)
        return Kernel(binary, name, tile.shared_bytes, device)
    except Unavailable as reason:
        logger.info(f"The native engine leaves the products of {source.name} to the library, since {reason}.")
        return None


def _multiply_tile(columns: int, bf16: bool) -> str:
    """d += a b, or d = a b: [64, 16] times [16, columns], by four warps."""
    count = columns // 2
    kind = "bf16" if bf16 else "f16"
    names = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void multiply_tile(float (&d)[{count}], u64 a, u64 b, bool adds) {{
    asm volatile("{{ .reg .pred adds; setp.ne.b32 adds, %{count + 2}, 0;"
        " wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{names}}},"
        " %{count}, %{count + 1}, adds, 1, 1, 0, 0; }}"
        : {sums} : "l"(a), "l"(b), "r"(static_cast<int>(adds)));
}}
"""
