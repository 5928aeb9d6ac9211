"""A conversation with a model: its messages, and the answer that is sampled next."""

import contextlib
from collections.abc import Generator
from typing import Any

from whetstone.errors import UserError
from whetstone.inference.answers import Answer, Piece
from whetstone.inference.sampler import Sampler


class Conversation:
    """`settings` are those of `Sampler.sample`: temperature, top_p, top_k, min_p, max_tokens."""

    def __init__(
        self, sampler: Sampler, *, system: str | None = None, seed: int = 0, **settings: Any
    ) -> None:
        self.sampler = sampler
        self.system = system  # None: the run's developer prompt; empty: none
        self.settings = settings
        self.messages: list[dict[str, str]] = []
        self._next_seed = seed

    def ask(self, question: str) -> Answer:
        """Ask, and wait for the whole answer."""
        answers = [piece.answer for piece in self.stream(question)]
        assert answers[-1] is not None
        return answers[-1]

    def stream(self, question: str) -> Generator[Piece]:
        """Ask; the pieces of the answer. Closing the iterator keeps what there is as the answer."""
        return self._stream([*self.messages, {"role": "user", "content": question}])

    def again(self) -> Generator[Piece]:
        """Another answer to the last question, in place of the old one."""
        return self._stream(self.open_messages())

    def open_messages(self) -> list[dict[str, str]]:
        """The messages up to the last question."""
        messages = list(self.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise UserError("Nothing has been asked yet: write a question first.")
        return messages

    def clear(self) -> None:
        """Forget the messages; the system prompt and the settings stay."""
        self.messages = []

    def next_options(self) -> dict[str, Any]:
        """What the next answer is sampled with, beside the messages; its seed is new."""
        self._next_seed += 1
        stop, seed = self.sampler.next_question, self._next_seed - 1
        return {"system": self.system, "stop": stop, "seed": seed, **self.settings}

    def _stream(self, messages: list[dict[str, str]]) -> Generator[Piece]:
        text = ""
        with contextlib.closing(self.sampler.stream(messages, **self.next_options())) as pieces:
            try:
                for piece in pieces:
                    text += piece.text
                    yield piece
            except GeneratorExit:
                self._remember(messages, text)
                raise
        self._remember(messages, text)

    def _remember(self, messages: list[dict[str, str]], text: str) -> None:
        prefix = self.sampler.chat.config.assistant_prefix
        self.messages = [*messages, {"role": "assistant", "content": prefix + text}]
