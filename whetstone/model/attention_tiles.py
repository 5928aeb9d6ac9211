"""Tiles of packed segments: which program of attention has which queries and which keys."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from whetstone.types import Segment

RUNS = (1, 2, 4)  # that a segment may have before it; a kernel for each
# Queries and keys of a tile, the fastest of those tried on an H200. In the forward pass and for the gradients
# of queries a program has one tile of queries, for those of keys and values one of keys.
QUERY_TILE = {"ROWS": 128, "KEYS": 32, "num_warps": 8, "num_stages": 2, "maxnreg": 128}
KEY_TILE = {"ROWS": 32, "KEYS": 64, "num_warps": 4, "num_stages": 3}
MAX_ROWS = 4096  # queries of a program for the gradients of keys, all heads counted: prompts have many more


def make_tables(segments: Sequence[Segment], group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`query_tiles`, and both of `key_tiles`, where a key head has `group` query heads."""
    items, sums = key_tiles(segments, KEY_TILE["KEYS"], max(1, MAX_ROWS // group))
    tiles = query_tiles(segments, QUERY_TILE["ROWS"] // group)
    return _filled(tiles), _filled(items), _filled(sums)


def _filled(table: np.ndarray) -> np.ndarray:
    """At least two rows: a length of 0 or 1 would be a constant of a graph. Rows of zeros have no tokens."""
    return np.concatenate([table, np.zeros((max(0, 2 - len(table)), table.shape[1]), table.dtype)])


def query_tiles(segments: Sequence[Segment], num_tokens: int) -> np.ndarray:
    """[tiles, 12] the first token of `num_tokens`, then end and start of the segment, the number of earlier
    keys, and of four runs where it begins and how many keys there are up to its end.
    """
    rows = []
    for segment in segments:
        runs, before = [], 0
        for start, length in segment.prefix:
            before += length
            runs += [start, before]
        runs += [0, before] * (RUNS[-1] - len(segment.prefix))
        rows.append([segment.start, segment.start + segment.length, segment.start, before, *runs])
    table = np.array(rows, dtype=np.int32)
    counts = -(-(table[:, 1] - table[:, 0]) // num_tokens)
    number = _ranges(counts)
    table = np.repeat(table, counts, axis=0)
    table[:, 0] += number * num_tokens
    return table


def key_tiles(segments: Sequence[Segment], size: int, max_queries: int) -> tuple[np.ndarray, np.ndarray]:
    """The programs for gradients of keys, and which of them have to be summed.

    [items, 5]: the first key of `size`, the end of its keys, the first query token and the end of those, at
    most `max_queries`; the number of the part, -1 for a program that has all queries of its keys.
    [sums, 4]: the first key, the end of the keys, the first part and the number of parts.
    """
    ends = {s.start: s.start + s.length for s in segments}
    assert all(  # a run is the first tokens of a segment before
        start in ends and start + length <= min(ends[start], s.start)
        for s in segments
        for start, length in s.prefix
    ), "tiles of two segments would overlap"
    # Which queries see the first so many tokens from a start on.
    views = [(s.start, s.start, s.start + s.length, s.start + s.length) for s in segments]
    views += [
        (start, s.start, s.start + s.length, start + length) for s in segments for start, length in s.prefix
    ]
    table = np.array(views, dtype=np.int64)
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    start, first, end, limit = table.T
    # Neighbors that see the same keys are one: a prompt and its completions.
    joins = (start[1:] == start[:-1]) & (limit[1:] == limit[:-1]) & (first[1:] == end[:-1])
    begins = np.flatnonzero(np.concatenate([[True], ~joins]))
    last = np.append(begins[1:], len(table)) - 1
    start, first, end, limit = start[begins], first[begins], end[last], limit[begins]

    counts = -(-(limit - start) // size)
    tile = start.repeat(counts) + _ranges(counts) * size
    first, end, limit = np.maximum(first.repeat(counts), tile), end.repeat(counts), limit.repeat(counts)
    counts = -(-(end - first) // max_queries)
    tile, first = tile.repeat(counts), first.repeat(counts) + _ranges(counts) * max_queries
    end, limit = np.minimum(end.repeat(counts), first + max_queries), limit.repeat(counts)

    # Parts of a tile lie together. The most work comes first, so that the last programs are short.
    order = np.lexsort((first, tile))
    tile, first, end, limit = tile[order], first[order], end[order], limit[order]
    _, opening, inverse, counts = np.unique(tile, return_index=True, return_inverse=True, return_counts=True)
    is_part = counts[inverse] > 1
    part = np.where(is_part, np.cumsum(is_part) - 1, -1)
    several = counts > 1
    ends = np.maximum.reduceat(limit, opening)
    sums = np.stack([tile[opening], ends, part[opening], counts], axis=1)[several]
    items = np.stack([tile, limit, first, end, part], axis=1)
    items = items[np.argsort(first - end, kind="stable")]
    return items.astype(np.int32), sums.astype(np.int32)


def _ranges(counts: np.ndarray) -> np.ndarray:
    """0 to count - 1 for each count, one after the other."""
    ends = counts.cumsum()
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def lse_shape(query: Tensor, key: Tensor) -> tuple[int, int]:
    """[kv_heads, rows] of tokens [T, heads, D], and as many rows more as a program of keys may read."""
    num_tokens, kv_heads, _ = key.shape
    return kv_heads, (num_tokens * query.shape[1] // kv_heads + 15) // 16 * 16 + KEY_TILE["ROWS"]
