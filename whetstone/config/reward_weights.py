"""Keep `reward_weights` in step with `reward_funcs` where a later source replaces the functions alone.

`whet train multi_tasks 'reward_funcs=[accuracy]'` drops `format`: its weight in the file is dropped too.
"""

from typing import Any


def match_weights(earlier: dict[str, Any], later: dict[str, Any]) -> list[float] | None:
    """The weights of `later`'s reward functions, from `earlier`'s; None where there is nothing to match.

    A function that stays keeps its weight. A new one takes the weight of the function it replaces (the same
    place in the list, and dropped), else 1.
    """
    funcs, weights = earlier.get("reward_funcs"), earlier.get("reward_weights")
    new = later.get("reward_funcs")
    if "reward_weights" in later or not all(isinstance(each, list) for each in (funcs, weights, new)):
        return None
    assert isinstance(funcs, list) and isinstance(weights, list) and isinstance(new, list)
    if len(funcs) != len(weights) or funcs == new:
        return None
    matched = []
    for place, name in enumerate(new):
        if name in funcs:
            matched.append(weights[funcs.index(name)])
        elif place < len(funcs) and funcs[place] not in new:
            matched.append(weights[place])
        else:
            matched.append(1.0)
    return matched


def keep_weights(earlier: dict[str, Any], later: dict[str, Any], origin: str, notes: list[str]) -> None:
    """Give `later` the weights of its reward functions, and say so."""
    weights = match_weights(earlier, later)
    if weights is None or weights == earlier["reward_weights"]:
        return
    later["reward_weights"] = weights
    shown = ", ".join(f"{name} {weight}" for name, weight in zip(later["reward_funcs"], weights, strict=True))
    notes.append(f"reward_weights follows reward_funcs ({origin}): {shown}.")
