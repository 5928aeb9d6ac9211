"""linear.cu on a CPU (hopper_on_cpu.h), beside float64. Run by test_linear_cuda.py in a process of its own.

python -m tests.hopper.linear_on_cpu ROWS DEPTH WIDTH SMS bf16|fp16 [bias] [late] [and ...]
"""

import ctypes
import sys
from pathlib import Path

import torch
from torch import nn

from tests.hopper.attention_on_cpu import build
from tests.hopper.gated_on_cpu import tensor_map
from whetstone.engines.native.fused_linear import FusedLinear
from whetstone.engines.native.kernels.hopper import linear as hopper_linear
from whetstone.engines.native.kernels.hopper import tiles
from whetstone.engines.native.kernels.hopper.linear import BLOCKS, THREADS, LinearTile
from whetstone.engines.native.kernels.hopper.tiles import DEPTH

ENTRY = f"""
extern "C" void run(int x, int y, int z, const TensorMap* inputs, const TensorMap* weights, const u16* bias,
    char* out, int rows, int width, int steps, int tile_rows) {{
    gridDim = {{x, y, z}};
    auto kernel = [&] {{ linear(*inputs, *weights, bias, out, rows, width, steps, tile_rows); }};
    for (int column = 0; column < z; column++)
        for (int row = 0; row < y; row++) {{
            blockIdx = {{0, row, column}};
            fibers::run_block({THREADS}, kernel, {BLOCKS});
        }}
}}
"""
HERE = Path(__file__).parent


class OnCpu:
    """A kernel, called as cuda.Kernel is."""

    def __init__(self, tile: LinearTile, late: bool):
        words = [(HERE / name).read_text() for name in ("warp_on_cpu.h", "hopper_on_cpu.h")]
        source = "\n".join([*words, hopper_linear.SOURCE.read_text(), ENTRY])
        self.library = build(source, [*tile.macros(), f"-DFETCH_LATE={int(late)}"])

    def __call__(self, grid, threads, arguments) -> None:
        assert threads == THREADS and grid[0] == BLOCKS
        inputs, weights, bias, out, *numbers = arguments
        fenced = torch.full((len(out) + 64, out.shape[1]), 7.0, dtype=out.dtype)
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (bias, fenced))
        self.library.run(*grid, ctypes.byref(inputs), ctypes.byref(weights), *pointers, *numbers)
        assert (fenced[len(out) :] == 7).all(), "it wrote behind its rows"
        out.copy_(fenced[: len(out)])


def check(rows: int, depth: int, width: int, dtype: torch.dtype, *, bias: bool, device: str = "cpu") -> None:
    """That it multiplies as float64 does."""
    torch.manual_seed(0)
    x = torch.randn(rows, depth).to(device, dtype)
    layer = nn.Linear(depth, width, bias=bias).to(device, dtype).requires_grad_(False)
    product = hopper_linear.try_linear(x, FusedLinear([layer]))
    assert product is not None
    got = product.double()
    exact = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    assert got.shape == exact.shape
    worst = ((got - exact).abs() / (exact.abs() + 1)).max().item()
    assert worst < (5e-3 if dtype == torch.bfloat16 else 6e-4), worst


def main(rows: int, depth: int, width: int, multi: int, dtype: torch.dtype, words: list[str]) -> None:
    hopper_linear.tensor_map = tensor_map
    hopper_linear.supports = lambda x, joined: True
    hopper_linear.multiprocessors = lambda device: multi
    hopper_linear._compiled = lambda tile, device: OnCpu(tile, "late" in words)
    tiles.MAX_STAGES = 2
    assert depth > 2 * BLOCKS * DEPTH, "no stage would be used twice"
    check(rows, depth, width, dtype, bias="bias" in words)


if __name__ == "__main__":
    for words in " ".join(sys.argv[1:]).split(" and "):
        numbers, dtype, *more = words.split()[:4], *words.split()[4:]
        rows, depth, width, multiprocessors = map(int, numbers)
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        main(rows, depth, width, multiprocessors, kind, more)
