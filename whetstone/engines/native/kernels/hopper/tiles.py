"""What gated.cu and linear.cu share: tiles, and the tensors that TMA can fetch."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from whetstone.engines.native.kernels.hopper.nvrtc import Variant, definitions

HOPPER = Path(__file__).with_name("hopper.cuh")
CAPABILITY, ARCHITECTURE = (9, 0), "sm_90a"  # wgmma exists on this architecture only
DEPTH, LINE = 64, 128  # elements of a row in a stage, and their bytes
MAX_SHARED_BYTES = 232_448  # of a block
MAX_STAGES = 8


@dataclass(frozen=True, kw_only=True)
class Tile(Variant):
    """The part of a product that a cluster computes at a time."""

    architecture: str = ARCHITECTURE
    rows: int
    columns: int

    @property
    def extra_bytes(self) -> int:
        """Shared memory besides the stages."""
        raise NotImplementedError

    @property
    def stages(self) -> int:
        return min(MAX_STAGES, (MAX_SHARED_BYTES - self.extra_bytes) // self._stage_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.extra_bytes + self.stages * self._stage_bytes

    @property
    def _stage_bytes(self) -> int:
        return (self.rows + self.columns) * LINE + 16

    def headers(self) -> str:
        return super().headers() + HOPPER.read_text() + _multiply_tile(self.columns, self.bf16)

    def macros(self) -> list[str]:
        return [*super().macros(), *definitions(COLUMNS=self.columns, STAGES=self.stages)]


def supports_tma(x: Tensor, weight: Tensor) -> bool:
    """Whether this is a Hopper GPU and the rows of [n, K] and [N, K] are aligned for TMA."""
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


def rows_per_part(rows: int, parts: int) -> int:
    """Rows of each of `parts` equal parts, a multiple of eight."""
    return 8 * -(-rows // (8 * parts))


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
