"""gated.cu on a CPU (hopper_on_cpu.h), beside float64. Run by test_gated_cuda.py in a process of its own:
threads that wait for each other for ever end it.

    python -m tests.hopper.gated_on_cpu ROWS DEPTH WIDTH COLUMNS SMS bf16|fp16 silu|gelu [late] [and ...]
"""

import ctypes
import sys
from pathlib import Path

import torch

from tests.hopper.attention_on_cpu import build
from whetstone.engines.native.fused_linear import FusedLinear
from whetstone.engines.native.kernels.hopper import gated as hopper_gated
from whetstone.engines.native.kernels.hopper.gated import BLOCKS, THREADS, GateUpTile
from whetstone.engines.native.kernels.hopper.tiles import DEPTH

ENTRY = f"""
extern "C" void run(int blocks, const TensorMap* inputs, const TensorMap* weights, char* out, int rows,
    int width, int steps, int half_rows) {{
    gridDim = {{blocks, 1, 1}};
    for (int block = 0; block < blocks; block += {BLOCKS}) {{
        blockIdx = {{block, 0, 0}};
        auto kernel = [&] {{ gate_up(*inputs, *weights, out, rows, width, steps, half_rows); }};
        fibers::run_block({THREADS}, kernel, {BLOCKS});
    }}
}}
"""
HERE = Path(__file__).parent


class Map(ctypes.Structure):
    """As hopper_on_cpu.h has it."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        *((name, ctypes.c_uint64 * 4) for name in ("sizes", "strides", "box")),
    )


def tensor_map(tensor, sizes, strides, box) -> Map:
    rest = 4 - len(sizes)
    made = Map(base=tensor.data_ptr())
    made.sizes[:], made.strides[:] = [*sizes, *[1] * rest], [1, *strides, *[0] * rest]
    made.box[:] = [*box, *[1] * rest]
    return made


class OnCpu:
    """A kernel, called as cuda.Kernel is."""

    def __init__(self, tile: GateUpTile, late: bool):
        words = [(HERE / name).read_text() for name in ("warp_on_cpu.h", "hopper_on_cpu.h")]
        source = "\n".join([*words, hopper_gated.SOURCE.read_text(), ENTRY])
        self.library = build(source, [*tile.macros(), f"-DFETCH_LATE={int(late)}"])

    def __call__(self, grid, threads, arguments) -> None:
        assert threads == THREADS
        inputs, weights, out, *numbers = arguments
        maps = (ctypes.byref(inputs), ctypes.byref(weights))
        self.library.run(grid[0], *maps, ctypes.c_void_p(out.data_ptr()), *numbers)


def check(rows: int, depth: int, width: int, dtype: torch.dtype, gelu: bool, run) -> None:
    """That `run`, here or on a GPU, multiplies as float64 does."""
    torch.manual_seed(0)
    x = torch.randn(rows, depth).to(dtype)
    weight = (torch.randn(2 * width, depth) / depth**0.5).to(dtype)
    got = run(x, joined(weight)).double()
    gates, values = (x.double() @ weight.double().t()).chunk(2, dim=1)
    exact = (torch.nn.GELU("tanh") if gelu else torch.nn.SiLU())(gates) * values
    assert got.shape == exact.shape
    error = ((got - exact).norm() / exact.norm()).item()
    assert error < (6e-3 if dtype == torch.bfloat16 else 8e-4), error
    worst = ((got - exact).abs() / (exact.abs() + 1)).max().item()  # none of them is somebody else's
    assert worst < 3e-2, worst


def joined(weight: torch.Tensor) -> FusedLinear:
    gates, values = (torch.nn.Linear(weight.shape[1], len(weight) // 2, bias=False) for _ in range(2))
    for layer, part in zip((gates, values), weight.chunk(2), strict=True):
        layer.weight = torch.nn.Parameter(part, requires_grad=False)
    return FusedLinear([gates, values])


def main(
    rows: int, depth: int, width: int, columns: int, dtype: torch.dtype, gelu: bool, late: bool, multi: int
) -> None:
    tile = GateUpTile(
        rows=hopper_gated.row_tile(rows), columns=columns, gelu=gelu, bf16=dtype == torch.bfloat16
    )
    assert tile.stages * DEPTH < depth, "no stage would be used twice"
    kernel = OnCpu(tile, late)
    hopper_gated.tensor_map = tensor_map
    hopper_gated.supports = lambda x, joined: True
    hopper_gated.column_tile = lambda columns, multiprocessors: tile.columns
    hopper_gated.multiprocessors = lambda device: multi
    hopper_gated._compiled = lambda asked, device: kernel if asked == tile else None

    def run(x, joined):
        multiply = hopper_gated.try_gate_up(x, joined, gelu=gelu)
        assert multiply is not None
        return multiply(x)

    check(rows, depth, width, dtype, gelu, run)


if __name__ == "__main__":
    for words in " ".join(sys.argv[1:]).split(" and "):
        numbers, dtype, *more = words.split()[:5], *words.split()[5:]
        rows, depth, width, columns, multiprocessors = map(int, numbers)
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        main(rows, depth, width, columns, kind, "gelu" in more, "late" in more, multiprocessors)
