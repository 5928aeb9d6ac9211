"""A real OpenEnv server: a counting game whose actions are a text, a number or two fields.

python openenv_server.py PORT text|number|fields NUM_SESSIONS
"""

import random
import sys

import uvicorn  # type: ignore[reportMissingImports]
from openenv.core.env_server import Action, Environment, Observation, State  # type: ignore[reportMissingImports]
from openenv.core.env_server.http_server import create_app  # type: ignore[reportMissingImports]
from pydantic import Field


class TextAction(Action):
    message: str


class NumberAction(Action):
    guess: int


class FieldsAction(Action):
    guess: int
    reason: str


class Seen(Observation):
    text: str = ""
    hints: list[str] = Field(default_factory=list)


class Guess(Environment):
    """Higher or lower, from 1 to 9; three guesses."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, high: int = 9, **others) -> Seen:
        self.number, self.num_guesses = random.Random(seed).randint(1, high), 0
        return Seen(text=f"Guess my number from 1 to {high}.")

    def step(self, action: Action) -> Seen:
        self.num_guesses += 1
        said = action.message if isinstance(action, TextAction) else action.guess
        if said == "crash":
            raise RuntimeError("the game broke")
        guess = int(str(said).split()[-1])
        if guess == self.number:
            return Seen(text="Right.", reward=1.0, done=True)
        text = "Higher." if guess < self.number else "Lower."
        return Seen(text=text, reward=0.0, done=self.num_guesses >= 4)

    @property
    def state(self) -> State:
        return State(step_count=self.num_guesses)


ACTIONS = {"text": TextAction, "number": NumberAction, "fields": FieldsAction}

if __name__ == "__main__":
    port, kind, sessions = sys.argv[1:]
    app = create_app(Guess, ACTIONS[kind], Seen, env_name="guess", max_concurrent_envs=int(sessions))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
