"""The micro-batch size, and the bounds of its search."""

from dataclasses import dataclass

DEFAULT_TOKENS = 8192  # on a CPU, where nothing is measured
MAX_TOKENS = 16384  # more is not faster: 60 % MFU on an H200 at 1.5 B with 16 k and with 32 k
TARGET_TOKENS = 8192  # below this, activation checkpointing pays
MIN_TOKENS = 256  # the smallest size that is tried


@dataclass
class MicroBatchSize:
    """`tokens` 0: not found yet."""

    tokens: int
    checkpointed_layers: int | None = None  # None: as configured

    def metrics(self) -> dict[str, float]:
        layers = self.checkpointed_layers
        checkpointing = {} if layers is None else {"checkpointed_layers": float(layers)}
        return {"micro_batch_tokens": float(self.tokens), **checkpointing}


@dataclass(frozen=True, kw_only=True)
class SizeBounds:
    """Tokens of the longest sequence, which can't be split, and of all that a rank runs in a step."""

    longest: int
    total: int
    uses_padding: bool = False  # attention pads: a short sequence takes as much memory as the longest

    @property
    def max_tokens(self) -> int:
        return max(self.longest, min(MAX_TOKENS, self.total))

    @property
    def target_tokens(self) -> int:
        return max(self.longest, min(TARGET_TOKENS, self.total))
