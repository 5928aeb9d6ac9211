"""The entry `curriculum` of a task under `datasets`: when its problems get harder."""

from typing import Self

from pydantic import Field, model_validator

from whetstone.config.base import Section


class CurriculumSpec(Section):
    """reasoning-gym's levels of difficulty, climbed by accuracy. `curriculum: true` takes these defaults."""

    start: int = Field(default=0, ge=0, le=1_000)
    """The level that training begins at."""
    top: int | None = Field(default=None, ge=0, le=1_000)
    """The highest level that is used; none: all there are."""
    up: float = Field(default=0.8, gt=0, le=1)
    """One level up when at least this share of the newest answers is right."""
    down: float | None = Field(default=None, ge=0, lt=1)
    """One level down when at most this share is right; none: never."""
    window: int = Field(default=128, ge=1, le=1_000_000)
    """How many answers, all of the present level, that share is taken over."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top is not None and self.top < self.start:
            raise ValueError(f"top is {self.top}, below start, which is {self.start}: raise it")
        if self.down is not None and self.down >= self.up:
            raise ValueError(f"down is {self.down}, which must be below up, {self.up}: lower it")
        return self
