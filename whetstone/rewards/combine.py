"""The weighted sum of the parts of a reward, and the name of each part."""

from collections.abc import Mapping, Sequence


def part_names(reward_funcs: Sequence[str]) -> tuple[str, ...]:
    """The name of each reward function's part: the function's own name, or all of it where two share that
    name.
    """
    short_names = [name.rsplit(":", 1)[-1] for name in reward_funcs]
    return tuple(
        name if short_names.count(name) == 1 else spec
        for name, spec in zip(short_names, reward_funcs, strict=True)
    )


def combine(parts: Mapping[str, float], names: Sequence[str], weights: Sequence[float] | None) -> float:
    """The sum of weight x part over the named parts; a part that is absent does not apply and is left out."""
    weights = [1.0] * len(names) if weights is None else weights
    return float(
        sum(weight * parts[name] for name, weight in zip(names, weights, strict=True) if name in parts)
    )
