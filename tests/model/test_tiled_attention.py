"""Which tiles attention has, which models get them, and the kernels as a Hopper GPU has them."""

import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support import packed, plain_flash  # noqa: F401
from tests.support.hopper import SHARED_BYTES, compiled
from whetstone.model import tiled_attention
from whetstone.model.attention import PackedAttention
from whetstone.model.attention import _attention as attention_of_a_layer
from whetstone.model.attention_tiles import KEY_TILE, QUERY_TILE, key_tiles, query_tiles
from whetstone.model.flash import FlashPlan
from whetstone.model.tiled_attention import TilePlan, plan_attention
from whetstone.types import Segment

CPU = torch.device("cpu")


def random_segments(rng: random.Random) -> list[Segment]:
    """Prompts with completions, prompts that begin as an earlier one, and branches of turns."""
    segments: list[Segment] = []
    for _ in range(rng.randint(1, 12)):
        prefix: tuple[tuple[int, int], ...] = ()
        if segments and rng.random() < 0.8:
            earlier = rng.choice(segments)
            runs = (*earlier.prefix, (earlier.start, earlier.length))
            if len(runs) <= 4:
                start, length = runs[-1]
                prefix = (*runs[:-1], (start, rng.randint(1, length)))
        start = segments[-1].start + segments[-1].length if segments else 0
        segments.append(Segment(start, rng.randint(1, 30), prefix))
    return segments


def visible(segments: list[Segment]) -> np.ndarray:
    """[queries, keys] how often each query sees each key."""
    num_tokens = sum(segment.length for segment in segments)
    seen = np.zeros((num_tokens, num_tokens), dtype=int)
    for start, length, prefix in segments:
        for token in range(start, start + length):
            seen[token, start : token + 1] += 1
            for first, count in prefix:
                seen[token, first : first + count] += 1
    return seen


@pytest.mark.parametrize("seed", range(20))
def test_tiles_have_every_query_with_every_key_it_sees_once(seed: int) -> None:
    rng = random.Random(seed)
    segments = random_segments(rng)
    expected = visible(segments)
    size = rng.choice([1, 4, 16])

    seen = np.zeros_like(expected)
    for first, end, start, before, *runs in query_tiles(segments, size).tolist():
        keys, used = [], 0
        for begin, last in zip(runs[::2], runs[1::2], strict=True):
            keys += range(begin, begin + last - used)
            used = last
        assert used == before
        for token in range(first, min(first + size, end)):
            np.add.at(seen[token], [*keys, *range(start, token + 1)], 1)
    assert (seen == expected).all()

    seen = np.zeros_like(expected)
    items, sums = key_tiles(segments, size, rng.choice([3, 1000]))
    parts: dict[int, list[int]] = {}
    for first, end, query, query_end, part in items.tolist():
        for token in range(query, query_end):
            seen[token, first : min(first + size, end, token + 1)] += 1
        parts.setdefault(first, []).append(part)
    assert (seen == expected).all()
    summed = {first: list(range(part, part + count)) for first, _, part, count in sums.tolist()}
    assert {first: sorted(numbers) for first, numbers in parts.items() if len(numbers) > 1} == summed
    assert all(numbers == [-1] for first, numbers in parts.items() if first not in summed)
    for first, end, _, _ in sums.tolist():  # a sum is stored for all keys of its tile
        assert end == max(limit for begin, limit, *_ in items.tolist() if begin == first)


def plan_of(segments: list[Segment] = packed.SHARED, **changes: object) -> TilePlan | FlashPlan:
    settings = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, **changes}
    return plan_attention(segments, SimpleNamespace(**settings), settings["head_dim"], CPU, torch.bfloat16)


def test_which_models_get_tiles(monkeypatch) -> None:
    assert isinstance(plan_of(), FlashPlan)  # no GPU
    monkeypatch.setattr(tiled_attention, "has_kernels", lambda device, dtype, head_dim: head_dim == 64)
    plan = plan_of()
    assert isinstance(plan, TilePlan) and (plan.group, plan.head_dim, plan.num_pieces) == (3, 64, 2)
    assert isinstance(plan_of(head_dim=80), FlashPlan)
    assert isinstance(plan_of(sliding_window=4096), FlashPlan)
    assert isinstance(plan_of(num_key_value_heads=None), FlashPlan)
    chain = [Segment(n, 1, tuple((m, 1) for m in range(n))) for n in range(6)]
    assert isinstance(plan_of(chain[:5]), TilePlan)
    assert isinstance(plan_of(chain), FlashPlan)  # more runs than a kernel has


def test_a_run_that_is_no_prefix_is_refused() -> None:
    for prefix in (((2, 3),), ((0, 5),), ((4, 3),)):  # inside a segment, beyond its end, of itself
        with pytest.raises(AssertionError, match="overlap"):
            key_tiles([Segment(0, 4), Segment(4, 6, prefix)], 2, 100)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kv_heads", [2, 3])
def test_layer_outside_the_plan_has_the_other_attention(window, kv_heads, monkeypatch) -> None:
    """Heads in other groups, or a window: the same numbers without tiles."""
    plan = TilePlan(packed.BRANCHES, 3, 8, CPU)
    calls = []
    attend = plan.attend
    monkeypatch.setattr(plan, "attend", lambda *args, **kwargs: calls.append(1) or attend(*args, **kwargs))
    torch.manual_seed(0)
    query, key, value = (torch.randn(59, heads, 8, dtype=torch.float64) for heads in (6, kv_heads, kv_heads))
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    out, _ = attention_of_a_layer(
        SimpleNamespace(layer_idx=0),
        q,
        k,
        v,
        None,
        attend=PackedAttention(packed.BRANCHES, CPU, plan),
        scaling=0.3,
        sliding_window=window,
    )
    expected = packed.attend(query, key, value, packed.BRANCHES, 0.3, window)
    torch.testing.assert_close(out[0], expected, rtol=0, atol=1e-12)
    assert len(calls) == (1 if (window, kv_heads) == (None, 2) else 0)


@pytest.mark.parametrize("kernel", ["forward", "query", "key"])
def test_a_kernel_fits_and_waits_for_its_products(kernel: str) -> None:
    """The shared memory of a program, and no product that is still read from while the next load writes."""
    pytest.importorskip("triton")
    from whetstone.model import attention_kernels

    sizes = KEY_TILE if kernel == "key" else QUERY_TILE
    constants = {"GROUP": 6, "HEAD_DIM": 128, "COLUMNS": 12, "RUNS": 4, "LONG": False}
    program = compiled(getattr(attention_kernels, f"_attention_{kernel}_kernel"), {**constants, **sizes})
    assert program.metadata.shared <= SHARED_BYTES
    assert "async_copy_global_to_local" in program.asm["ttgir"]
    assert "warp_group_dot" in program.asm["ttgir"]
    assert not re.search(r"pendings = [1-9]", program.asm["ttgir"])
