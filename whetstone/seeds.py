"""The only source of randomness: every random choice is a pure function of what it is for.

`seed(run, step, problem, sample)` names a sample; `uniforms(seed, start, count)` are its random numbers.
Because nothing is drawn from a generator that moves on, a run can be stopped and resumed anywhere and makes
the same choices. Global generators are not touched.
"""

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # scoring workers need `seed` alone, and numpy takes time to import
    import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment


def seed(*parts: int | str) -> int:
    """A 63-bit seed from any names and numbers: `seed(42, "rollout", step, problem_id, sample)`."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def uniforms(sample_seed: int, start: int, count: int) -> "np.ndarray":
    """The random numbers in [0, 1) of `count` token positions of one sample from `start` on (splitmix64)."""
    import numpy as np

    counter = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = np.uint64(sample_seed & _MASK) + counter * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
