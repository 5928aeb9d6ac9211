"""How sure an evaluation can be: intervals, pass@k and a paired test. Pure numbers in, pure numbers out.

A *table* is one row per problem, holding whether each of its samples was right. Problems are independent,
samples of one problem are not: every 95 % interval here is over problems. One sample a problem: Wilson's
interval and McNemar's exact test. Several: Student's t on the means of the problems.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Table = Sequence[Sequence[bool]]

Z = 1.959963984540054  # 97.5 % quantile of the normal distribution


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """A share of right answers with its 95 % interval."""

    mean: float
    low: float
    high: float
    num_problems: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """After minus before on the same problems, its 95 % interval and the two-sided p-value of "no change"."""

    difference: float
    low: float
    high: float
    p_value: float


def accuracy(table: Table) -> Accuracy:
    """Mean over problems of the share of right samples."""
    assert table and all(row for row in table), "an accuracy needs at least one sample of each problem"
    shares = [sum(row) / len(row) for row in table]
    mean = math.fsum(shares) / len(shares)
    if all(len(row) == 1 for row in table) or len(set(shares)) == 1:
        # Problems that all came out alike show no spread: Wilson, as if of one sample each, stays honest.
        low, high = wilson(mean, len(shares))
    else:
        half = _t_half_width(shares)
        low, high = max(0.0, mean - half), min(1.0, mean + half)
    return Accuracy(mean=mean, low=low, high=high, num_problems=len(table))


def mean_interval(table: Sequence[Sequence[float]]) -> Accuracy:
    """The mean over problems of any number that samples have, such as a reward, with a t interval."""
    means = [math.fsum(row) / len(row) for row in table]
    mean = math.fsum(means) / len(means)
    half = _t_half_width(means) if len(means) > 1 else 0.0
    return Accuracy(mean=mean, low=mean - half, high=mean + half, num_problems=len(means))


def wilson(share: float, num: int) -> tuple[float, float]:
    """Wilson's score interval of a share observed in `num` independent trials."""
    center = (share + Z**2 / (2 * num)) / (1 + Z**2 / num)
    half = Z / (1 + Z**2 / num) * math.sqrt(share * (1 - share) / num + Z**2 / (4 * num**2))
    # At 0 and 1 the bound is exact by algebra; rounding would miss it by 1e-17.
    return (0.0 if share == 0 else max(0.0, center - half)), (1.0 if share == 1 else min(1.0, center + half))


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that k samples drawn without replacement hold a right one: unbiased, 1 - C(n-c, k) / C(n, k)."""
    assert 1 <= k <= num_samples and 0 <= num_right <= num_samples
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def pass_at_k_table(table: Table) -> dict[int, float]:
    """Mean pass@k over problems for k = 1, 2, 4, ... and the number of samples."""
    num_samples = min(len(row) for row in table)
    ks = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples] + [num_samples]
    return {k: math.fsum(pass_at_k(len(row), sum(row), k) for row in table) / len(table) for k in ks}


def paired(before: Table, after: Table) -> Difference:
    """Whether the same problems came out better: each is its own control, so luck in their choice cancels."""
    assert before and len(before) == len(after), "a paired test needs the same problems twice"
    changes = [sum(b) / len(b) - sum(a) / len(a) for a, b in zip(before, after, strict=True)]
    difference = math.fsum(changes) / len(changes)
    single = all(len(row) == 1 for row in (*before, *after))
    if single or len(set(changes)) == 1:
        low, high = _bonett_price(changes)
        p_value = sign_test(sum(c > 0 for c in changes), sum(c < 0 for c in changes))
    else:
        half = _t_half_width(changes)
        low, high = max(-1.0, difference - half), min(1.0, difference + half)
        p_value = t_two_sided(difference / _standard_error(changes), len(changes) - 1)
    return Difference(difference=difference, low=low, high=high, p_value=p_value)


def sign_test(num_better: int, num_worse: int) -> float:
    """Exact two-sided p-value of better and worse being equally likely: McNemar's on single samples."""
    num = num_better + num_worse
    tail = sum(math.comb(num, i) for i in range(min(num_better, num_worse) + 1))
    return min(1.0, 2 * tail / 2**num)


def _bonett_price(changes: Sequence[float]) -> tuple[float, float]:
    """Bonett and Price (2012): Wald's with a better and a worse problem added, so that it never vanishes."""
    changes = [*changes, 1.0, -1.0]
    num = len(changes)
    mean = math.fsum(changes) / num
    half = Z * math.sqrt((math.fsum(c * c for c in changes) / num - mean**2) / num)
    return max(-1.0, mean - half), min(1.0, mean + half)


def _standard_error(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def _t_half_width(values: Sequence[float]) -> float:
    return t_quantile(len(values) - 1) * _standard_error(values)


def t_two_sided(t: float, degrees: int) -> float:
    """P(|T| >= |t|) for Student's t."""
    return _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def t_quantile(degrees: int) -> float:
    """The t beyond which 5 % lie on both sides together: 12.71 at 1 degree of freedom, 1.96 at many."""
    low, high = 1.0, 16.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_two_sided(middle, degrees) > 0.05 else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b), by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only on the other side
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(
        a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    )
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    value = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * value / a
