"""Products of a decoder layer: microseconds a layer. `down`, `out` and `qkv` by the library, whole and in
parts, and by linear.cu; the former two with the residual addition and norm after them, which sums the parts,
`qkv` with the norm before it (nobody sums its parts). `gated`, the first half of the MLP and the norm before
it, by the library and by gated.cu.

    python benchmarks/decode_products.py
    python benchmarks/decode_products.py --products gated,down --rows 256

Times are of CUDA graphs over as many matrices as the model has layers, so that no product finds its matrix
in the cache; ways are timed in turn, for the chip's clock falls while it gets warm. `*` is what the engine
chooses. Nothing is written.
"""

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rollout_work import SIZES
from torch import Tensor

from whetstone.engines.native import fused_linear
from whetstone.engines.native.kernels.hopper import gated as hopper_gated
from whetstone.engines.native.kernels.hopper import linear as hopper_linear
from whetstone.engines.native.kernels.pointwise import add_norm, gated

ROUNDS = 5


def microseconds(graph: torch.cuda.CUDAGraph, layers: int, repeats: int = 8) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats / layers * 1000


def captured(run: Callable[[], list[Tensor]]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def measure(product: str, size: str, rows: int, choices: list[int]) -> str:
    hidden, num_layers, heads, kv_heads, between = SIZES[size]
    inner, outer = {
        "down": (between, hidden),
        "out": (hidden, hidden),
        "qkv": (hidden, hidden // heads * (heads + 2 * kv_heads)),
    }[product]
    joined = []
    for _ in range(num_layers):
        layer = torch.nn.Linear(inner, outer, bias=False, device="cuda", dtype=torch.bfloat16)
        joined.append(fused_linear.FusedLinear([layer]))
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    chosen = fused_linear.num_splits(rows, outer, inner, multiprocessors) if product == "down" else 1

    def one_layer(multiply: Callable[[Tensor], Tensor]) -> Tensor:
        if product == "qkv":
            return multiply(add_norm(None, residual, norm, None, (1e-6, 0.0)))
        return add_norm(multiply(x), residual, norm, None, (1e-6, 0.0))

    graphs = {}
    for parts in choices:
        for one in joined:
            one._num_splits = lambda _, parts=parts: parts
        graphs[str(parts)] = captured(lambda: [one_layer(one.split_k) for one in joined])
    is_ours = product != "down" and hopper_linear.supports(x, joined[0])
    if rows <= 512 and hopper_linear.column_tile(rows, outer, multiprocessors) <= hopper_linear.MAX_COLUMNS:
        with up_to(rows, hopper_linear):
            by_us: list[Any] = [lambda x, one=one: hopper_linear.try_linear(x, one) for one in joined]
            graphs["linear.cu"] = captured(lambda: [one_layer(multiply) for multiply in by_us])
    name = "linear.cu" if is_ours else str(chosen)
    return f"{product:5s} {size} {rows:5d} rows, parts: us   " + in_turn(graphs, num_layers, name)


@contextlib.contextmanager
def up_to(rows: int, kernel: Any) -> Iterator[None]:
    """So that it multiplies however many rows there are."""
    most, kernel.MAX_ROWS = kernel.MAX_ROWS, rows
    yield
    kernel.MAX_ROWS = most


def measure_gated(size: str, rows: int) -> str:
    hidden, num_layers, _, _, between = SIZES[size]
    joined = []
    for _ in range(num_layers):
        kind = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        joined.append(fused_linear.FusedLinear([torch.nn.Linear(hidden, between, **kind) for _ in range(2)]))
    residual = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    chosen = hopper_gated.try_gate_up(residual, joined[0], gelu=False)

    def by_library(one: fused_linear.FusedLinear) -> Tensor:
        return gated(one(add_norm(None, residual, norm, None, (1e-6, 0.0))), gelu=False)

    def by_us(one: fused_linear.FusedLinear) -> Tensor:
        multiply = hopper_gated.try_gate_up(residual, one, gelu=False)
        assert multiply is not None
        return multiply(add_norm(None, residual, norm, None, (1e-6, 0.0)))

    with up_to(rows, hopper_gated):
        graphs = {
            name: captured(lambda layer=layer: [layer(one) for one in joined])
            for name, layer in (("library", by_library), ("gated.cu", by_us))
        }
    name = "library" if chosen is None else "gated.cu"
    return f"gated {size} {rows:5d} rows, us   " + in_turn(graphs, num_layers, name)


def in_turn(graphs: dict[str, torch.cuda.CUDAGraph], num_layers: int, chosen: str) -> str:
    took: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            took[name].append(microseconds(graph, num_layers))
    return "   ".join(f"{n}{'*' if n == chosen else ''}: {statistics.median(took[n]):.1f}" for n in graphs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--products", default="gated,down,out,qkv")
    parser.add_argument("--sizes", default="0.5b,1.5b,3b")
    parser.add_argument("--rows", default="16,64,128,192,256,384,512,1024")
    parser.add_argument("--parts", default="1,2,4,8", help="for down, out and qkv")
    args = parser.parse_args()
    parts = [int(number) for number in args.parts.split(",")]
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for product in args.products.split(","):
        for size in args.sizes.split(","):
            for rows in map(int, args.rows.split(",")):
                if product == "gated":
                    print(measure_gated(size, rows), flush=True)
                else:
                    print(measure(product, size, rows, parts), flush=True)


if __name__ == "__main__":
    main()
