"""Answers of a model: finished ones, and pieces of those that are being sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from whetstone.endpoint.text_stream import Decode, StopTexts, TextStream
from whetstone.engines.base import PartialOutput
from whetstone.types import Finish


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished sample."""

    text: str  # without special tokens
    token_ids: tuple[int, ...]  # with the stop token
    logprobs: tuple[float, ...]  # of each token, with temperature and filters applied
    finish: Finish
    prompt_ids: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What is new of a sample. The texts of its pieces, joined, are the text of the answer."""

    sample: int
    text: str  # may be empty: a character that is not complete yet
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    answer: Answer | None = None  # of the last piece


@dataclass(frozen=True, kw_only=True)
class TokenDetails:
    """A token of an answer, as the model saw it."""

    token_id: int
    text: str
    logprob: float  # at temperature 1, without filters
    entropy: float  # in nats
    likeliest: tuple[tuple[str, float], ...]  # text and logprob of the most likely tokens


class AnswerStream:
    """One answer while it is sampled: what of it was given out as pieces."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._text, self._stops = TextStream(decode), StopTexts(stops)
        self._num_tokens, self._shown = 0, ""
        self.is_finished = False

    def advance(self, output: PartialOutput, prompt_ids: tuple[int, ...]) -> Piece:
        text = self._stops.push(self._text.push(output.token_ids))
        answer = None
        if self._stops.is_reached:
            answer = Answer(
                text=self._shown + text,
                token_ids=tuple(output.token_ids),
                logprobs=tuple(output.logprobs),
                finish=Finish.STOP,
                prompt_ids=prompt_ids,
            )
        return self._piece(output.sample, text, output.token_ids, output.logprobs, answer)

    def end(self, sample: int, answer: Answer) -> Piece:
        text = self._stops.push(self._text.finish(answer.text))
        if self._stops.is_reached:
            answer = replace(answer, text=self._shown + text, finish=Finish.STOP)
        else:
            text += self._stops.finish()
        return self._piece(sample, text, answer.token_ids, answer.logprobs, answer)

    def _piece(
        self,
        sample: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        answer: Answer | None,
    ) -> Piece:
        new, self._num_tokens = self._num_tokens, len(token_ids)
        self._shown += text
        self.is_finished = answer is not None
        return Piece(
            sample=sample,
            text=text,
            token_ids=tuple(token_ids[new:]),
            logprobs=tuple(logprobs[new:]),
            answer=answer,
        )
