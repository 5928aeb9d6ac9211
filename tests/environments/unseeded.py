"""An environment that ignores its seed: its episodes begin otherwise than their prompts say."""

import uuid


class Unseeded:
    def reset(self, seed: int) -> str:
        return f"The password is {uuid.uuid4()}. Say it."

    def step(self, text: str):
        return "", 1.0, True, False, {}
