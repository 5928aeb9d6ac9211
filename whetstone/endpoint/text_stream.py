"""Tokens -> pieces of text while they are sampled; texts that end an answer.

A piece never ends within a character.
"""

from collections.abc import Callable, Collection, Sequence

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


class StopTexts:
    """Ends a text before the first of `stops`; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.is_reached = False

    def push(self, piece: str) -> str:
        """The part of the text that is certain by now."""
        text = self._held + piece
        ends = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            self.is_reached, self._held = True, ""
            return text[: min(ends)]
        lengths = (n for stop in self._stops for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n]))
        size = len(text) - max(lengths, default=0)
        self._held = text[size:]
        return text[:size]

    def finish(self) -> str:
        """What was held back, when the answer has ended otherwise."""
        return self._held


def num_until_stop(token_ids: Sequence[int], decode: Decode, stops: Sequence[str]) -> int | None:
    """Tokens up to the one that completes the first of `stops`; None where there is none."""
    stream, texts = TextStream(decode), StopTexts(stops)
    for count in range(1, len(token_ids) + 1) if any(stops) else ():
        texts.push(stream.push(token_ids[:count]))
        if texts.is_reached:
            return count
    return None


def num_until_token(token_ids: Sequence[int], stop_ids: Collection[int]) -> int | None:
    """Tokens up to the first of `stop_ids`, included."""
    return next((n + 1 for n, token in enumerate(token_ids) if token in stop_ids), None)
