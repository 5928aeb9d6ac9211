"""Environments in TRL's shape whose tools misbehave, one class for each way."""

import os
import sys
import time


class Good:
    def reset(self, **row: object) -> str:
        return "call it"

    def use(self) -> str:
        """Use the tool."""
        return "used"

    def get_reward(self) -> float:
        return 1.0


class ToolHangs(Good):
    def use(self) -> str:
        """Use the tool."""
        time.sleep(600)
        return ""


class ToolExits(Good):
    def use(self) -> str:
        """Use the tool."""
        os._exit(1)


class ToolCallsExit(Good):
    def use(self) -> str:
        """Use the tool."""
        sys.exit("bye")


class ToolRaises(Good):
    def use(self) -> str:
        """Use the tool."""
        raise RuntimeError("it is broken")


class ToolReturnsNone(Good):
    def use(self) -> None:
        """Use the tool."""


class ToolReturnsMuch(Good):
    def use(self) -> str:
        """Use the tool."""
        return "x" * (8 << 20)


class ToolChangesItsSignature(Good):
    def use(self) -> str:
        """Use the tool."""
        Good.use = ToolChangesItsSignature.use = lambda self, number: number  # type: ignore[method-assign]
        return "used"


class ToolTextRaises(Good):
    def use(self) -> object:
        """Use the tool."""

        class Odd:
            def __str__(self) -> str:
                raise RuntimeError("no text")

        return Odd()


class ToolIsAGenerator(Good):
    def use(self):
        """Use the tool."""
        yield "used"


class RewardRaises(Good):
    def get_reward(self) -> float:
        raise RuntimeError("no reward")


class RewardIsText(Good):
    def get_reward(self) -> str:
        return "a lot"


class RewardIsNan(Good):
    def get_reward(self) -> float:
        return float("nan")


class RewardHangs(Good):
    def get_reward(self) -> float:
        time.sleep(600)
        return 1.0


# Class -> part of a tool's answer, part of the episode's failure; None: there is none.
RESULTS: dict[type[Good], tuple[str | None, str | None]] = {
    ToolHangs: (None, "no answer in"),
    ToolExits: (None, "has ended"),
    ToolCallsExit: (None, "has ended"),
    ToolRaises: ("Error: RuntimeError: it is broken", None),
    ToolReturnsNone: ("None", None),
    ToolReturnsMuch: (None, "characters"),
    ToolChangesItsSignature: ("used", None),
    ToolTextRaises: (None, "no text"),
    ToolIsAGenerator: ("generator", None),
    RewardRaises: ("used", "no reward"),
    RewardIsText: ("used", "as the reward"),
    RewardIsNan: ("used", "the reward nan"),
    RewardHangs: ("used", "no answer in"),
}
