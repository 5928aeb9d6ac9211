"""An environment whose observations would command a terminal."""


class Hostile:
    def reset(self, seed: int) -> str:
        return "Say \x1b[31mred\x1b[0m.\r"

    def step(self, text: str):
        return "\x1b]0;title\x07 you said: " + text, 0.5, True, False, {"correct": False}
