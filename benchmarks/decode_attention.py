"""The decode attention of the native engine, Triton's kernel beside the one in CUDA: microseconds a layer.

    python benchmarks/decode_attention.py

Samples in groups of 8 share a prompt of 192 tokens; `own` is how many tokens each has drawn. Times are of
CUDA graphs over as many layers as the model has, so that no kernel finds its keys in the cache; the two are
timed in turn. `*` is the one that `hopper_attention.fills_gpu` chooses. Nothing is written.
"""

import argparse
import statistics

import torch
from decode_products import ROUNDS, captured, microseconds
from rollout_work import SIZES

from whetstone.engines.native.kernels import attention
from whetstone.engines.native.kernels.hopper import attention as hopper_attention
from whetstone.engines.native.slot_state import (
    ACTIVE,
    NUM_CACHED,
    PAGE,
    PROMPT_LEN,
    AttentionLayer,
    CacheShape,
    PagedState,
)
from whetstone.model.attention import LayerOptions

GROUP, PROMPT, MOST = 8, 192, 512


def filled(size: str, rows: int) -> tuple[PagedState, list[AttentionLayer]]:
    hidden, num_layers, heads, kv_heads, _ = SIZES[size]
    width, device = hidden // heads, torch.device("cuda")
    shape = CacheShape(
        num_layers=num_layers, num_heads=kv_heads, head_dim=width, dtype=torch.bfloat16, device=device
    )
    prompt_pages, own_pages = PROMPT // PAGE, MOST // PAGE + 1
    state = PagedState(shape, rows, prompt_pages + own_pages, MOST)
    groups = -(-rows // GROUP)
    state.allocate_pages(groups * prompt_pages + rows * own_pages)
    assert state.pages is not None
    state.pages.normal_()
    row = torch.arange(rows)[:, None]
    state.table[:, :prompt_pages] = (
        (row // GROUP * prompt_pages + torch.arange(prompt_pages)).int().to(device)
    )
    own = groups * prompt_pages + row * own_pages + torch.arange(own_pages)
    state.table[:, prompt_pages:] = own.int().to(device)
    state.slots[ACTIVE], state.slots[PROMPT_LEN] = 1, PROMPT
    tables = [torch.randn(PROMPT + MOST, width // 2, device=device, dtype=torch.bfloat16) for _ in range(2)]
    layers = [
        AttentionLayer(
            options=LayerOptions(layer=layer, scale=width**-0.5, sliding_window=None, softcap=None),
            heads=heads, kv_heads=kv_heads, head_dim=width, rotary=(tables[0], tables[1]),
        )
        for layer in range(num_layers)
    ]  # fmt: skip
    return state, layers


def measure(size: str, rows: int, lengths: list[int]) -> str:
    state, layers = filled(size, rows)
    sizes = [
        layers[0].head_dim * count for count in (layers[0].heads, layers[0].kv_heads, layers[0].kv_heads)
    ]
    both = torch.randn(rows, sum(sizes), device="cuda", dtype=torch.bfloat16)
    query, key, value = both.split(sizes, dim=1)
    places = torch.arange(rows, device="cuda", dtype=torch.int32)
    is_cuda = hopper_attention.fills_gpu(rows * layers[0].kv_heads, state.table.shape[1])
    fewest = hopper_attention.MIN_PROGRAMS
    graphs, outs = {}, {}
    state.slots[NUM_CACHED] = lengths[-1]  # for the comparison
    for name, least in (("Triton", 1 << 30), ("CUDA", 1)):
        hopper_attention.MIN_PROGRAMS = least
        outs[name] = attention.decode_attention(query, key, value, state, places, layers[0]).float()
        graphs[name] = captured(
            lambda: [attention.decode_attention(query, key, value, state, places, layer) for layer in layers]
        )
    hopper_attention.MIN_PROGRAMS = fewest
    took = {(name, own): [] for name in graphs for own in lengths}
    for _ in range(ROUNDS):
        for own in lengths:
            state.slots[NUM_CACHED] = own
            for name, graph in graphs.items():
                took[name, own].append(microseconds(graph, len(layers)))
    lines = []
    for name in graphs:
        chosen = "*" if (name == "CUDA") == is_cuda else " "
        words = [f"own {own}: {statistics.median(took[name, own]):6.1f}" for own in lengths]
        lines.append(f"{size} {rows:5d} rows {name:>6s}{chosen} us   " + "   ".join(words))
    error = ((outs["CUDA"] - outs["Triton"]).norm() / outs["Triton"].norm()).item()
    return "\n".join(lines) + f"   they differ by {error:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="0.5b,1.5b,3b")
    parser.add_argument("--rows", default="16,32,48,64,128,256,512,1024")
    parser.add_argument("--own", default="1,128,256,480", help="tokens drawn, at most 512")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for size in args.sizes.split(","):
        for rows in map(int, args.rows.split(",")):
            print(measure(size, rows, [int(own) for own in args.own.split(",")]), flush=True)


if __name__ == "__main__":
    main()
