"""The budget of a process alone, found by trying until memory runs out.

Memory grows in line with tokens, so two sizes tell the third. Where too few tokens would fit, the first
layers forget their activations and are run again in the backward pass: as few of them as it takes.
"""

import math
from collections.abc import Callable

import torch

from whetstone.model.memory import Gauge
from whetstone.model.policy import Policy
from whetstone.update.micro_batch_size.sizes import LEAST, Budget, Sizes

SHARE = 0.92  # of the memory that is free; the rest is for what lies between the pieces


class Finder:
    """Looks for a budget by `attempt(tokens)`: one forward and backward pass of a made-up batch."""

    def __init__(self, policy: Policy, attempt: Callable[[int], None], sizes: Sizes, gauge: Gauge):
        self.policy, self.attempt, self.sizes, self.gauge = policy, attempt, sizes, gauge

    def find(self, *, may_run_again: bool) -> Budget:
        """The largest budget that fits; or, where that is too small, the fewest layers to run again."""
        self._peak(LEAST)  # compiles, and makes what is made once
        points = self._points()
        budget = Budget(tokens=max(points, default=0))
        if may_run_again and budget.tokens < self.sizes.enough:
            budget = self._with_layers_run_again(points)
        return budget

    def _points(self) -> dict[int, int]:
        """Tokens that fit, the most that do among them, and the bytes they take; empty if none do."""
        tokens, points = self.sizes.enough, {}
        while (peak := self._peak(tokens)) is None:
            tokens //= 2
            if tokens < LEAST:
                return {}
        points[tokens] = peak
        half = self._peak(tokens // 2)
        assert half is not None
        points[tokens // 2] = half
        reach = min(self.sizes.most, Line(points).reach(SHARE * self.gauge.free()))
        for more in (reach, (reach + tokens) // 2):
            if more > 1.1 * tokens and (peak := self._peak(more)) is not None:
                points[more] = peak
                break
        return points

    def _with_layers_run_again(self, kept: dict[int, int]) -> Budget:
        """Memory is in line with the number of layers, too."""
        num_layers, enough = len(self.policy.trunk.layers), self.sizes.enough
        self.policy.run_layers_again(num_layers)
        dropped = self._points()
        tokens = max(dropped, default=0)
        if tokens >= enough and len(kept) > 1:
            most = Line(kept).at(enough)
            too_much = most - SHARE * self.gauge.free()
            saved = max(1.0, (most - Line(dropped).at(enough)) / num_layers)
            for layers in range(max(1, math.ceil(too_much / saved)), num_layers):
                self.policy.run_layers_again(layers)
                if self._peak(enough) is not None:
                    return Budget(tokens=enough, layers_run_again=layers)
            self.policy.run_layers_again(num_layers)
        return Budget(tokens=tokens, layers_run_again=num_layers)

    def _peak(self, tokens: int) -> int | None:
        """Bytes that a pass takes on top of what is there; None if there are not so many."""
        try:
            return self.gauge.most_taken(lambda: self.attempt(tokens))
        except torch.OutOfMemoryError:
            pass
        # Outside the handler: the exception holds everything that was on its way.
        torch.cuda.empty_cache()
        return None


class Line:
    """Bytes by tokens, through the two largest points."""

    def __init__(self, points: dict[int, int]):
        less, more = sorted(points)[-2:]
        self.slope = max(1.0, (points[more] - points[less]) / (more - less))
        self.fixed = points[more] - self.slope * more

    def at(self, tokens: int) -> float:
        return self.fixed + self.slope * tokens

    def reach(self, size: float) -> int:
        return max(0, int((size - self.fixed) / self.slope))
