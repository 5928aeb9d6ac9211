"""What the products that are written for Hopper chips (gated.cu, linear.cu) share: their words, and which
matrices their tiles can be fetched from.
"""

from pathlib import Path

import torch
from torch import Tensor

from whetstone.engines.native.kernels.attention_cuda import WARP

HOPPER = Path(__file__).with_name("hopper.cuh")
CAPABILITY, ARCHITECTURE = (9, 0), "sm_90a"  # its instructions are this chip's and no other's
DEPTH, LINE = 64, 128  # numbers of a row in a stage, and their bytes
MOST_SHARED = 232_448  # bytes of a block


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


def eights(rows: int, parts: int) -> int:
    """Rows of each part, where all have the same: a multiple of eight, as tiles are laid out."""
    return 8 * -(-rows // (8 * parts))


def words(columns: int, bf16: bool) -> str:
    """To be put before a kernel's source, whose tiles have so many columns."""
    return WARP.read_text() + HOPPER.read_text() + _multiply_tile(columns, bf16)


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
