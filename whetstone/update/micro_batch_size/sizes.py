"""What a budget is, and the bounds within which one is looked for. Measures nothing."""

from dataclasses import dataclass

UNTRIED = 8192  # where there is nothing to try it on
MOST = 16384  # a GPU gains nothing from more: 60 % of an H200's matrix rate at 1.5 B with 16 k and with 32 k
ENOUGH = 8192  # fewer than these are worth running layers again for
LEAST = 256  # fewer are not tried


@dataclass
class Budget:
    """`tokens` 0: not found yet."""

    tokens: int
    layers_run_again: int | None = None  # None: as the configuration says

    def row(self) -> dict[str, float]:
        again = {} if self.layers_run_again is None else {"checkpointed_layers": float(self.layers_run_again)}
        return {"micro_batch_tokens": float(self.tokens), **again}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Tokens of the longest sequence, which can't be cut, and of all that a rank has to run in a step."""

    longest: int
    wanted: int
    pads: bool = False  # attention lays sequences side by side: a short one takes as much as the longest

    @property
    def most(self) -> int:
        return max(self.longest, min(MOST, self.wanted))

    @property
    def enough(self) -> int:
        return max(self.longest, min(ENOUGH, self.wanted))
