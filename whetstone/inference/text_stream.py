"""Tokens -> pieces of text while they are sampled. A piece never ends within a character."""

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"  # what tokenizers write for bytes that are no whole character yet
Decode = Callable[[Sequence[int]], str]


class TextStream:
    """The text of one growing sequence of tokens.

    Only the last few tokens are decoded each time: those of the newest piece, since a tokenizer may write a
    token otherwise at the start of a text, and those after it. The pieces together are the whole text.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._start = self._end = 0  # the tokens of the newest piece
        self._emitted = 0  # characters

    def push(self, token_ids: Sequence[int]) -> str:
        """All tokens so far -> the text that is new; empty while a character is incomplete."""
        before = self._decode(token_ids[self._start : self._end])
        text = self._decode(token_ids[self._start :])
        if len(text) <= len(before) or text.endswith(INCOMPLETE) or not text.startswith(before):
            return ""
        self._start, self._end = self._end, len(token_ids)
        self._emitted += len(text) - len(before)
        return text[len(before) :]

    def finish(self, text: str) -> str:
        """The rest of the whole text."""
        return text[self._emitted :]
