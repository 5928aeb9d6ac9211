"""The budget of weights that are spread over ranks: one that all agree on, found by passes that surely fit.

Where one rank ran out of memory, the others would wait for it in the middle of a layer. So no pass is tried
that could fail: after a pass the next one is only so much larger as the memory that is left on the poorest
rank allows, if bytes grow in proportion to tokens. They grow less, since part of them is there for any
number of tokens, and so the passes come near the limit from below. `next_size` and `layers_kept` are the
arithmetic; what a pass takes and what is free is measured by a gauge.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from whetstone.model.memory import Gauge
from whetstone.model.policy import Policy
from whetstone.parallel.collectives import least_of
from whetstone.update.micro_batch_size.sizes import LEAST, Budget, Sizes

SHARE = 0.85  # of the memory that is free: less than a process alone takes, which may fail
STEP = 4  # a pass has at most so many times the tokens of the one before
WORTH = 1.03  # fewer tokens more are not worth a pass


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A pass that was run: what it took and might have taken here, in bytes, and how many times the room of
    the poorest rank holds what it took there.
    """

    tokens: int
    taken: float
    room: float
    times: float


def next_size(trial: Trial, sizes: Sizes, most: int) -> int:
    """Tokens of the next pass, which surely fits; as many as before where there is no room for more."""
    tokens = trial.tokens
    times = min(trial.times, STEP)
    if tokens < sizes.longest:  # one sequence: attention may take the square of its length
        return min(most, sizes.longest, max(tokens, int(tokens * math.sqrt(times))))
    size = min(most, int(tokens * times))
    if sizes.pads and -(-size // sizes.longest) * sizes.longest > tokens * times:  # a part takes as much
        size -= size % sizes.longest
    return max(tokens, size)


def layers_kept(none_again: Trial, all_again: Trial, sizes: Sizes, num_layers: int) -> int:
    """How many layers may surely keep their activations at `all_again.tokens`, on this rank.

    Bytes lie below the straight line from no layer to all of them, since they are the largest of several
    sums; what they would be with no layer run again is known to be at most in proportion.
    """
    growth = all_again.tokens / none_again.tokens
    most = none_again.taken * growth ** (2 if none_again.tokens < sizes.longest else 1)
    each = (most - all_again.taken) / num_layers
    spare = all_again.room - all_again.taken
    if spare <= 0:
        return 0
    return num_layers if each <= 0 else min(num_layers, int(spare / each))


class AgreedFinder:
    """Looks for a budget by `attempt(tokens)`, which all ranks call alike."""

    def __init__(self, policy: Policy, attempt: Callable[[int], None], sizes: Sizes, gauge: Gauge):
        self.policy, self.attempt, self.sizes, self.gauge = policy, attempt, sizes, gauge

    def find(self, *, may_run_again: bool) -> Budget:
        """The largest budget that surely fits on every rank; or, where that is too small, few layers to run
        again.
        """
        least = min(LEAST, self.sizes.most)
        self._try(least)  # compiles, and makes what is made once
        plain = self._grow(least, self.sizes.most)
        if not may_run_again or plain.tokens >= self._enough:
            return Budget(tokens=plain.tokens)
        num_layers = len(self.policy.trunk.layers)
        self.policy.run_layers_again(num_layers)
        again = self._grow(plain.tokens, self._enough)
        if again.tokens < self._enough:
            return Budget(tokens=again.tokens, layers_run_again=num_layers)
        kept = int(least_of(self.policy.ranks, layers_kept(plain, again, self.sizes, num_layers)))
        while kept:
            self.policy.run_layers_again(num_layers - kept)
            if self._try(again.tokens).times >= 1:
                break
            kept //= 2
        self.policy.run_layers_again(num_layers - kept)
        return Budget(tokens=again.tokens, layers_run_again=num_layers - kept)

    @property
    def _enough(self) -> int:
        enough, longest = self.sizes.enough, self.sizes.longest
        return enough // longest * longest if self.sizes.pads else enough

    def _grow(self, tokens: int, most: int) -> Trial:
        """Passes from `tokens` on, until no larger one would surely fit or pay; the last of them."""
        trial = self._try(tokens)
        while True:
            size = next_size(trial, self.sizes, most)
            reaches = trial.tokens < size and size in (most, self.sizes.longest)
            if size < WORTH * trial.tokens and not reaches:
                return trial
            trial = self._try(size)

    def _try(self, tokens: int) -> Trial:
        taken = self.gauge.most_taken(lambda: self.attempt(tokens))
        room = SHARE * self.gauge.free()
        times = least_of(self.policy.ranks, room / max(1, taken))
        return Trial(tokens=tokens, taken=taken, room=room, times=times)
