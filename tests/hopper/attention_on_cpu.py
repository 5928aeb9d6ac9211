"""attention.cu on a CPU (warp_on_cpu.h), beside a reference in float64. Run by test_attention_cuda.py in a
process of its own: threads that wait for each other for ever end it.

    python -m tests.hopper.attention_on_cpu WIDTH KV_HEADS GROUP bf16|fp16 [norm]
"""

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from whetstone.engines.native.kernels.hopper.attention import LOG2E, SOURCE, AttentionVariant
from whetstone.engines.native.kernels.hopper.attention import ROWS as BLOCK_ROWS
from whetstone.engines.native.slot_state import PAGE, CacheShape, PagedState

ENTRY = """
extern "C" void run(int blocks, int heads, const u16* q, const u16* k, const u16* v, u16* out,
    const u16* cosines, const u16* sines, const u16* q_norm, const u16* k_norm, const long long* bases,
    const int* fields, const int* table, const int* rows, int layer, int q_stride, int k_stride, int v_stride,
    int slots, int width, int num_rows, float scale, float eps, float offset) {
    for (int y = 0; y < heads; y++)
        for (int x = 0; x < blocks; x++) {
            blockIdx = {x, y, 0};
            fibers::run_block(THREADS, [&] {
                decode_attention(q, k, v, out, cosines, sines, q_norm, k_norm, bases, fields, table, rows,
                    layer, q_stride, k_stride, v_stride, slots, width, num_rows, scale, eps, offset);
            });
        }
}
"""
# Prompt and own tokens of each slot; slots with the same letter share a prompt. None: not active.
SLOTS = [
    ("a", 130, 70), ("a", 130, 1), ("a", 130, 0), ("a", 130, 64),  # a block has two rows
    ("b", 65, 33), ("b", 65, 31), ("c", 64, 63), ("c", 64, 128),
    ("d", 300, 5), ("d", 300, 32), None, ("d", 300, 97),  # one of a block, and its other row dead
    ("e", 0, 0), ("e", 0, 17), ("f", 1, 0), ("g", 2040, 70),  # more pages than a warp has lanes
]  # fmt: skip
ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, -1, -1, -1, -1, 3, -1, 0]
EPS, OFFSET, SCALE, LAYER = 1e-6, 1.0, 0.11, 1


def main(width: int, kv_heads: int, group: int, dtype: torch.dtype, norm: bool) -> None:
    warp = Path(__file__).with_name("warp_on_cpu.h").read_text()
    variant = AttentionVariant(
        bf16=dtype == torch.bfloat16,
        architecture="",
        head_dim=width,
        group=group,
        kv_heads=kv_heads,
        rotary=True,
        norm=norm,
    )
    library = build(warp + SOURCE.read_text() + ENTRY, variant.macros())

    def launch(query, key, value, rotary, norms, state, rows):
        out = torch.full_like(query, 7.0)
        tensors = (query, key, value, out, *rotary, *norms, state.bases, state.slots, state.table, rows)
        library.run(
            -(-len(rows) // BLOCK_ROWS), kv_heads,
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
            LAYER, query.stride(0), key.stride(0), value.stride(0), state.num_slots, state.table.shape[1],
            len(rows), *map(ctypes.c_float, (SCALE * LOG2E, EPS, OFFSET)),
        )  # fmt: skip
        dead = [row for row, slot in enumerate(ROWS) if slot < 0 or SLOTS[slot] is None]
        assert (out[dead] == 7).all()
        return out, state.pages

    check(launch, width, kv_heads, group, dtype, norm)


def check(launch, width: int, kv_heads: int, group: int, dtype: torch.dtype, norm: bool) -> None:
    """That `launch`, here or on a GPU, returns what float64 does, and writes to the cache what it should."""
    torch.manual_seed(0)
    heads, num_rows = kv_heads * group, len(ROWS)
    state, place = fill(kv_heads, width, dtype)
    query, key, value = torch.randn(num_rows, (heads + 2 * kv_heads) * width).to(dtype).split(
        [heads * width, kv_heads * width, kv_heads * width], dim=1
    )  # fmt: skip
    rotary = [torch.randn(2560, width // 2).to(dtype) for _ in range(2)]
    norms = [(torch.rand(width) - 0.5).to(dtype) for _ in range(2)]
    assert state.pages is not None
    before = state.pages.clone()
    out, pages = launch(query, key, value, rotary, norms, state, torch.tensor(ROWS, dtype=torch.int32))
    exact = 2e-2 if dtype == torch.bfloat16 else 3e-3
    for row, slot in enumerate(ROWS):
        facts = SLOTS[slot] if slot >= 0 else None
        if facts is None:
            continue
        position = facts[1] + facts[2]
        turned = [
            prepared(x[row].view(-1, width), weight if norm else None, [table[position] for table in rotary])
            for x, weight in ((query, norms[0]), (key, norms[1]))
        ]
        cells = [place(slot, n) for n in range(position)]
        new_page, new_at = place(slot, position)
        for head in range(kv_heads):
            cache = [
                torch.stack([before[n, LAYER, page, head, at] for page, at in cells]).double()
                if cells
                else torch.zeros(0, width).double()
                for n in (0, 1)
            ]
            new_key = turned[1][head].to(dtype).double()
            new_value = value[row].view(-1, width)[head].double()
            keys, values = torch.cat([cache[0], new_key[None]]), torch.cat([cache[1], new_value[None]])
            mine = slice(head * group, head * group + group)
            scores = turned[0][mine].to(dtype).double() @ keys.t() * SCALE
            expected = scores.softmax(-1) @ values
            got = out[row].view(heads, width)[mine].double()
            error = ((got - expected).norm() / expected.norm()).item()
            assert error < exact, (row, slot, head, error)
            if ROWS.count(slot) == 1:
                assert torch.allclose(pages[0, LAYER, new_page, head, new_at].double(), new_key, atol=exact)
                assert torch.equal(pages[1, LAYER, new_page, head, new_at].double(), new_value)
    same = (pages == before) | (pages.isnan() & before.isnan())
    assert same[:, 1 - LAYER].all(), "another layer was written to"
    written = {(page, at) for page, at in (~same).nonzero()[:, [2, 4]].tolist()}
    seats = {place(slot, SLOTS[slot][1] + SLOTS[slot][2]) for slot in ROWS if slot >= 0 and SLOTS[slot]}
    assert written == seats, "another token was written to"


def prepared(x, norm, rotary):
    """Norm and rotary embedding in float64."""
    x = x.double()
    if norm is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (norm.double() + OFFSET)
    low, high = x.chunk(2, dim=-1)
    cosine, sine = (table.double() for table in rotary)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)


def fill(kv_heads: int, width: int, dtype: torch.dtype):
    """Pages in no order, prompts shared, and not a number wherever there is no token."""
    shape = CacheShape(
        num_layers=2, num_heads=kv_heads, head_dim=width, dtype=dtype, device=torch.device("cpu")
    )
    state = PagedState(shape, len(SLOTS), 40, 16)
    state.allocate_pages(120)
    assert state.pages is not None
    state.pages.fill_(float("nan"))
    free = torch.randperm(120).tolist()
    prompts: dict[str, list[int]] = {}
    for slot, facts in enumerate(SLOTS):
        if facts is None:
            continue
        name, prefix, own = facts
        if name not in prompts:
            prompts[name] = [free.pop() for _ in range(-(-prefix // PAGE))]
        mine = [*prompts[name], *(free.pop() for _ in range(own // PAGE + 1))]
        state.table[slot, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        state.slots[:, slot] = torch.tensor([1, prefix, own, 0, 9, 0], dtype=torch.int32)

    def place(slot: int, token: int) -> tuple[int, int]:
        facts = SLOTS[slot]
        assert facts is not None
        prefix = facts[1]
        prompt_pages = -(-prefix // PAGE)
        number, at = (token // PAGE, token % PAGE) if token < prefix else (
            prompt_pages + (token - prefix) // PAGE, (token - prefix) % PAGE)  # fmt: skip
        return int(state.table[slot, number]), at

    for slot, facts in enumerate(SLOTS):
        for token in range(facts[1] + facts[2] if facts else 0):
            page, at = place(slot, token)
            if state.pages[0, 0, page, 0, at, 0].isnan():
                state.pages[:, :, page, :, at] = torch.randn(2, 2, kv_heads, width).to(dtype)
    return state, place


def build(source: str, options: list[str]) -> ctypes.CDLL:
    words = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "kernel.cpp", "-o", "kernel.so"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.cpp").write_text(source)
        subprocess.run([*words, *options], cwd=folder, check=True)
        return ctypes.CDLL(str(Path(folder, "kernel.so")))


if __name__ == "__main__":
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    width, kv_heads, group = (int(word) for word in sys.argv[1:4])
    main(width, kv_heads, group, dtypes[sys.argv[4]], "norm" in sys.argv)
