"""A user's environment, tools and reward functions, written for TRL's GRPOTrainer."""


class WordleEnv:
    """TRL's shape: reset(**row), tools, get_reward, state that reward functions read."""

    def reset(self, secret: str, **row: object) -> str | None:
        self.secret, self.guesses, self._hidden = secret, [], object()
        self.won = False
        return f" It has {len(secret)} letters."

    def guess(self, word: str) -> str:
        """
        Guess the word.

        Args:
            word: The guess
        """
        self.guesses.append(word)
        self.won = word == self.secret
        return "right" if self.won else "wrong"

    def get_reward(self) -> float:
        return 1.0 if self.won else 0.0


class Silent:
    """Without get_reward: reward functions pay."""

    def reset(self, **row: object) -> None:
        self.pressed = 0

    async def press(self) -> str:
        """Press the button."""
        self.pressed += 1
        return str(self.pressed)


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: The first
        b: The second
    """
    return a * b


class Memory:
    """A class of tools: an instance for each episode."""

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}

    def store(self, key: str, value: str) -> str:
        """
        Store a note.

        Args:
            key: Its name
            value: Its text
        """
        self.notes[key] = value
        return "stored"

    def recall(self, key: str) -> str:
        """
        Recall a note.

        Args:
            key: Its name
        """
        return self.notes[key]


def guesses_made(completions, environments, **columns):
    assert all(message["role"] for completion in completions for message in completion)
    return [None if env.guesses is None else 0.1 * len(env.guesses) for env in environments]


def presses(environments, **columns):
    return [float(env.pressed) for env in environments]


def last_role(completions, **columns):
    return [float(completion[-1]["role"] == "assistant") for completion in completions]
