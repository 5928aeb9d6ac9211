"""An environment in TRL's shape: public methods are tools."""

from typing import Literal


class Counter:
    def reset(self, start: int = 3, **row: object) -> str:
        self.value = start
        return f"The counter is at {start}. Bring it to 10."

    def add(self, number: int, direction: Literal["up", "down"] = "up") -> str:
        """
        Add to the counter.

        Args:
            number: How much, at least 1.
            direction: Whether the counter grows
                or shrinks.

        Returns:
            The new value.
        """
        if number < 1:
            raise ValueError("number must be at least 1")
        self.value += number if direction == "up" else -number
        return str(self.value)

    def get_reward(self) -> float:
        return float(self.value == 10)
