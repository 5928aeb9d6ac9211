"""Sampling on a GPU: logits -> the next token of every slot, in one pass over the vocabulary.

The first kernel computes the maximum and the mass of every chunk. The second finds the chunk that the random
number falls into and the token inside it, and updates the slot. The random numbers are those of
`seeds.uniforms`, computed from the slot's seed and its number of tokens, so a sample does not depend on its
batch. Top-k, top-p and min-p become one cutoff per row, found by bisection. Equals `cpu.sample`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whetstone.engines.native import slot_state
from whetstone.engines.native.slot_state import PagedState

CHUNK = 4096
_LOG2E = tl.constexpr(1.4426950408889634)
# Lower bits of a float32 that are always zero in a number that was half precision.
UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """float32 -> an integer in the same order; half precision needs only its upper bits."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """A number with this key: at or just below the smallest one that a row can hold."""
    key = (key << SHIFT).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _mass(x, bound, highest, temperature, COUNT: tl.constexpr):
    """How many of x are at least `bound`, or how much they weigh."""
    weight = tl.full(x.shape, 1.0, tl.float32) if COUNT else tl.exp((x - highest) / temperature)
    return tl.sum(tl.where(x >= bound, weight, 0.0), 0)


@triton.jit
def _largest_cutoff(
    logits_ptr, wanted, lowest, highest, temperature, vocabulary,
    COUNT: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest cutoff that keeps at least `wanted`: four parts of the range are tried in each pass."""
    column = tl.arange(0, BLOCK)
    low, high = _key(lowest, SHIFT), _key(highest, SHIFT)
    while low < high:
        span = high - low
        first, second, third = low + (span + 3) // 4, low + (2 * span + 3) // 4, low + (3 * span + 3) // 4
        bound_1, bound_2, bound_3 = _value(first, SHIFT), _value(second, SHIFT), _value(third, SHIFT)
        mass_1, mass_2, mass_3 = 0.0, 0.0, 0.0
        for start in range(0, vocabulary, BLOCK):
            x = tl.load(logits_ptr + start + column, mask=start + column < vocabulary, other=float("-inf"))
            x = x.to(tl.float32)
            mass_1 += _mass(x, bound_1, highest, temperature, COUNT)
            mass_2 += _mass(x, bound_2, highest, temperature, COUNT)
            mass_3 += _mass(x, bound_3, highest, temperature, COUNT)
        high = tl.where(mass_1 < wanted, first - 1, tl.where(mass_2 < wanted, second - 1,
                        tl.where(mass_3 < wanted, third - 1, high)))  # fmt: skip
        low = tl.where(mass_3 >= wanted, third, tl.where(mass_2 >= wanted, second,
                       tl.where(mass_1 >= wanted, first, low)))  # fmt: skip
    return _value(low, SHIFT)


@triton.jit(do_not_specialize=["num_slots"])
def _cutoff_kernel(
    logits_ptr, cutoff_ptr, settings_ptr, rows_ptr, num_slots, vocabulary, stride,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lowest logit that top-k, then min-p, then top-p leave in. Ties at the cutoff stay."""
    row = tl.program_id(0)
    slot = tl.load(rows_ptr + row)
    if slot < 0:
        return
    settings_ptr += slot
    temperature, top_p = tl.load(settings_ptr), tl.load(settings_ptr + num_slots)
    min_p, top_k = tl.load(settings_ptr + 2 * num_slots), tl.load(settings_ptr + 3 * num_slots)
    if temperature == 0 or (top_k == 0 and min_p == 0 and top_p >= 1):  # greedy, or without filters
        tl.store(cutoff_ptr + row, float("-inf"))
        return
    logits_ptr += row.to(tl.int64) * stride
    column = tl.arange(0, BLOCK)
    highest = tl.full((), float("-inf"), tl.float32)
    lowest = tl.full((), float("inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + column < vocabulary
        x = tl.load(logits_ptr + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, tl.max(x, 0))
        lowest = tl.minimum(lowest, tl.min(tl.where(x == float("-inf"), highest, x), 0))
    cutoff = lowest
    if top_k > 0:
        bound = _largest_cutoff(
            logits_ptr, top_k, lowest, highest, temperature, vocabulary, True, SHIFT, BLOCK
        )
        cutoff = tl.maximum(cutoff, bound)
    if min_p > 0:
        cutoff = tl.maximum(cutoff, highest + temperature * tl.log(min_p))
    if top_p < 1:
        left = 0.0
        for start in range(0, vocabulary, BLOCK):
            x = tl.load(logits_ptr + start + column, mask=start + column < vocabulary, other=float("-inf"))
            left += _mass(x.to(tl.float32), cutoff, highest, temperature, False)
        bound = _largest_cutoff(
            logits_ptr, left * top_p, cutoff, highest, temperature, vocabulary, False, SHIFT, BLOCK
        )
        cutoff = tl.maximum(cutoff, bound)
    tl.store(cutoff_ptr + row, tl.minimum(cutoff, highest))


@triton.jit
def _chunk_kernel(
    logits_ptr, stats_ptr, cutoff_ptr, settings_ptr, rows_ptr, vocabulary, stride,
    GREEDY: tl.constexpr, FILTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of every chunk: its highest logit, its mass under the sampling distribution, and the argmax."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    chunks = tl.num_programs(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    address = logits_ptr + row.to(tl.int64) * stride + column
    x = tl.load(address, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    temperature = tl.load(settings_ptr + tl.maximum(tl.load(rows_ptr + row), 0))
    temperature = tl.where(temperature == 0, 1.0, temperature)
    highest = tl.max(x, 0)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    # Exponentials take most of this kernel's time: one each, and no division.
    weights = tl.exp2((x - finite) * (_LOG2E / temperature))
    if FILTER:
        weights = tl.where(x >= tl.load(cutoff_ptr + row), weights, 0.0)
    stats = stats_ptr + (row * chunks + chunk) * 3
    tl.store(stats, highest)
    tl.store(stats + 1, tl.sum(weights, 0))
    if GREEDY:
        tl.store(stats + 2, (chunk * BLOCK + tl.argmax(x, 0)).to(tl.float32))


@triton.jit
def _uniform(seed, count):
    """Number `count` of the sample's stream: splitmix64, 53 bits, as in seeds.uniforms."""
    z = seed.to(tl.uint64) + (count + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return ((z >> 11).to(tl.float64) * 1.1102230246251565e-16).to(tl.float32)


@triton.jit(do_not_specialize=["num_slots", "max_tokens", "chunks"])
def _sample_kernel(
    logits_ptr, stats_ptr, cutoff_ptr, settings_ptr, rows_ptr,
    slots_ptr, seeds_ptr, stops_ptr, tokens_ptr, logprobs_ptr,
    vocabulary, stride, num_slots, max_tokens, chunks,
    GREEDY: tl.constexpr, FILTER: tl.constexpr, BLOCK: tl.constexpr, CHUNKS_PADDED: tl.constexpr,
    NUM_STOPS: tl.constexpr, F_ACTIVE: tl.constexpr, F_NUM_CACHED: tl.constexpr,
    F_NUM_GENERATED: tl.constexpr, F_MAX_NEW: tl.constexpr, F_TOKEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(rows_ptr + row)
    if slot < 0:
        return
    if tl.load(slots_ptr + F_ACTIVE * num_slots + slot) == 0:
        return
    own_temperature = tl.load(settings_ptr + slot)
    temperature = tl.where(own_temperature == 0, 1.0, own_temperature)
    num_generated = tl.load(slots_ptr + F_NUM_GENERATED * num_slots + slot)
    c = tl.arange(0, CHUNKS_PADDED)
    stats = stats_ptr + (row * chunks + c) * 3
    highs = tl.load(stats, mask=c < chunks, other=float("-inf"))
    highest = tl.max(highs, 0)
    # A chunk of -inf only has no mass.
    shift = tl.where(highs == float("-inf"), 0.0, highs - highest)
    masses = tl.load(stats + 1, mask=c < chunks, other=0.0) * tl.exp(shift / temperature)
    masses = tl.where(highs == float("-inf"), 0.0, masses)
    total = tl.sum(masses, 0)
    logits_row = logits_ptr + row.to(tl.int64) * stride
    token = tl.full((), 0, tl.int32)
    is_greedy = own_temperature == 0
    if GREEDY and is_greedy:
        best = tl.argmax(highs, 0)
        token = tl.load(stats_ptr + (row * chunks + best) * 3 + 2).to(tl.int32)
    else:
        target = _uniform(tl.load(seeds_ptr + slot), num_generated) * total
        before = tl.cumsum(masses, 0)
        chunk = tl.sum((before <= target).to(tl.int32), 0)
        # Rounding may carry past the end: then the last chunk that has any mass.
        last = tl.max(tl.where(masses > 0, c, 0), 0)
        chunk = tl.minimum(chunk, last)
        reached = tl.sum(tl.where(c < chunk, masses, 0.0), 0)
        column = chunk * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_row + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        weight = tl.exp2((x - highest) * (_LOG2E / temperature))
        if FILTER:
            weight = tl.where(x >= tl.load(cutoff_ptr + row), weight, 0.0)
        passed = tl.sum(((reached + tl.cumsum(weight, 0)) <= target).to(tl.int32), 0)
        last_in = tl.max(tl.where(weight > 0, tl.arange(0, BLOCK), 0), 0)
        token = (chunk * BLOCK + tl.minimum(passed, last_in)).to(tl.int32)
    logit = tl.load(logits_row + token).to(tl.float32)
    index = slot * max_tokens + num_generated
    tl.store(tokens_ptr + index, token)
    tl.store(logprobs_ptr + index, (logit - highest) / temperature - tl.log(total))
    stops = tl.load(stops_ptr + tl.arange(0, NUM_STOPS))
    stopped = tl.max((stops == token).to(tl.int32), 0)
    stopped = tl.where(tl.load(settings_ptr + 4 * num_slots + slot) == 0, 0, stopped)
    limit = tl.load(slots_ptr + F_MAX_NEW * num_slots + slot)
    num_cached = tl.load(slots_ptr + F_NUM_CACHED * num_slots + slot)
    tl.store(slots_ptr + F_TOKEN * num_slots + slot, token)
    tl.store(slots_ptr + F_NUM_GENERATED * num_slots + slot, num_generated + 1)
    tl.store(slots_ptr + F_NUM_CACHED * num_slots + slot, num_cached + 1)
    is_active = (stopped == 0) & (num_generated + 1 < limit)
    tl.store(slots_ptr + F_ACTIVE * num_slots + slot, is_active.to(tl.int32))


def sample(logits: Tensor, state: PagedState, rows: Tensor, *, greedy: bool, filtered: bool) -> None:
    """Sample one token for every slot of `rows` (-1: none) from its row of `logits` [n, V], and update the
    slots. Greedy sampling ignores filters, and its logprobs are unfiltered. `greedy`, `filtered`: whether
    some of the slots are.
    """
    num_rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    stats = torch.empty(num_rows, chunks, 3, dtype=torch.float32, device=logits.device)
    cutoff = torch.empty(num_rows if filtered else 0, dtype=torch.float32, device=logits.device)
    if filtered:
        _cutoff_kernel[(num_rows,)](
            logits, cutoff, state.settings, rows, state.num_slots, vocabulary, logits.stride(0),
            SHIFT=UNUSED_BITS[logits.dtype], BLOCK=CHUNK, num_warps=8,
        )  # fmt: skip
    _chunk_kernel[num_rows, chunks](
        logits, stats, cutoff, state.settings, rows, vocabulary, logits.stride(0),
        GREEDY=greedy, FILTER=filtered, BLOCK=CHUNK, num_warps=4,
    )  # fmt: skip
    _sample_kernel[(num_rows,)](
        logits, stats, cutoff, state.settings, rows,
        state.slots, state.seeds, state.stops, state.out_tokens, state.out_logprobs,
        vocabulary, logits.stride(0), state.num_slots, state.max_tokens, chunks,
        GREEDY=greedy, FILTER=filtered, BLOCK=CHUNK, CHUNKS_PADDED=triton.next_power_of_2(chunks),
        NUM_STOPS=slot_state.MAX_STOPS, F_ACTIVE=slot_state.ACTIVE, F_NUM_CACHED=slot_state.NUM_CACHED,
        F_NUM_GENERATED=slot_state.NUM_GENERATED, F_MAX_NEW=slot_state.MAX_NEW,
        F_TOKEN=slot_state.TOKEN, num_warps=8,
    )  # fmt: skip
