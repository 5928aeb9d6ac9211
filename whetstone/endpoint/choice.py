"""One answer while it is sampled: tokens -> text up to a stop string, tool calls, the reason of its end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from whetstone.endpoint.text_stream import StopTexts, TextStream
from whetstone.environments.calls import CALL_MARKERS, Tools, answer_start, parse_calls
from whetstone.types import Finish, Message, Problem, TopLogprobs

LONGEST_MARKER = max(map(len, CALL_MARKERS))


class ChatCodec(Protocol):
    """Messages to tokens and back: the part of `model.chat.Chat` that rollouts and endpoints need."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def call_hint(self) -> str: ...
    def encode(self, problem: Problem) -> tuple[int, ...]: ...
    def encode_solution(self, problem: Problem, solution: str | Message) -> tuple[int, ...]: ...
    def encode_observation(self, messages: Sequence[Message], max_tokens: int) -> tuple[int, ...]: ...
    def close_turn(self) -> tuple[int, ...]: ...
    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str: ...
    def turn(self, prompt: Sequence[int], token_ids: Sequence[int], *, keep_special: bool = False) -> str: ...


@dataclass(frozen=True, kw_only=True)
class TokenChunk:
    """What is new of a sample."""

    sample: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # temperature and filters applied
    finish: Finish | None = None  # of the last chunk
    top: tuple[TopLogprobs, ...] = ()  # of each token, where the request asks for them


@dataclass(frozen=True, kw_only=True)
class Codec:
    chat: ChatCodec
    stop_ids: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What is new of an answer."""

    sample: int
    text: str
    token_ids: tuple[int, ...]  # without the stop token
    logprobs: tuple[float, ...]
    top: tuple[TopLogprobs, ...] = ()
    tool_calls: tuple[dict[str, Any], ...] = ()
    finish_reason: str | None = None


class Choice:
    """With tools, text that may be a call is held back until the answer has ended."""

    def __init__(
        self, codec: Codec, stops: Sequence[str], *, tools: Tools = (), prompt: Sequence[int] = ()
    ) -> None:
        self._codec, self._tools, self._prompt = codec, tools, prompt
        self._stream, self._stops = TextStream(codec.chat.decode), StopTexts(stops)
        self._text = ""  # all of it, up to a stop string
        self._num_shown = 0  # characters that were given out
        self._is_held = False
        self._num_seen = 0  # tokens that were looked at
        self.token_ids: list[int] = []
        self.is_finished = False
        self.num_unread_calls = 0  # calls of tools that can't be read: they stay text

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def push(self, chunk: TokenChunk) -> Delta:
        """Take what is new; `is_finished` afterwards also where a stop string came."""
        self.token_ids.extend(chunk.token_ids)
        reason = None
        if chunk.finish is None:
            self._text += self._stops.push(self._stream.push(self.token_ids))
        else:
            whole = self._codec.chat.decode(self.token_ids)
            self._text += self._stops.push(self._stream.finish(whole))
            if not self._stops.is_reached:
                self._text += self._stops.finish()
            reason = "length" if chunk.finish is Finish.LENGTH else "stop"
        if self._stops.is_reached:
            reason = "stop"
        self.is_finished = reason is not None
        calls: tuple[dict[str, Any], ...] = ()
        if self._tools and self.is_finished:
            text, calls = self._read_calls()
            reason = "tool_calls" if calls else reason
        else:
            text = self._show()
        ends = (reason == "stop" and not self._stops.is_reached) or bool(calls)
        count = len(chunk.token_ids)
        if ends and count and chunk.token_ids[-1] in self._codec.stop_ids:
            count -= 1
        return Delta(
            sample=chunk.sample,
            text=text,
            token_ids=chunk.token_ids[:count],
            logprobs=chunk.logprobs[:count],
            top=chunk.top[:count],
            tool_calls=calls,
            finish_reason=reason,
        )

    def _show(self) -> str:
        """The text that can be given out now."""
        new = "" if self._is_held else self._text[self._num_shown :]
        if self._tools and not self._is_held:
            is_object = self._text[:100].lstrip().startswith(("{", "["))
            if is_object or any(map(self._is_special, self.token_ids[self._num_seen :])):
                self._is_held = True
            held = next(
                (n for n in range(len(new)) if _may_begin_call(new[n : n + LONGEST_MARKER])), len(new)
            )
            self._num_seen = len(self.token_ids)
            new = "" if self._is_held else new[:held]
        self._num_shown += len(new)
        return new

    def _is_special(self, token: int) -> bool:
        return token in self._codec.chat.special_ids and token not in self._codec.stop_ids

    def _read_calls(self) -> tuple[str, tuple[dict[str, Any], ...]]:
        """The rest of the text and the calls, at the end of the answer."""
        calls = parse_calls(
            self._codec.chat.turn(self._prompt, self.token_ids, keep_special=True), self._tools
        )
        rest = self._text[self._num_shown :]
        self.num_unread_calls = sum("error" in call for call in calls)
        if not calls or self.num_unread_calls:
            return rest, ()
        behind = max(0, (answer_start(self._text) or 0) - self._num_shown)
        starts = [start for marker in CALL_MARKERS if (start := rest.find(marker, behind)) >= 0]
        return (rest[: min(starts)] if starts else self._before_special()[self._num_shown :]), tuple(calls)

    def _before_special(self) -> str:
        """The text before the first special token, which marks a call that has no marker in the text."""
        ids = self.token_ids
        return self._codec.chat.decode(
            ids[: next((n for n, token in enumerate(ids) if self._is_special(token)), 0)]
        )


def _may_begin_call(text: str) -> bool:
    return any(marker.startswith(text) or text.startswith(marker) for marker in CALL_MARKERS)
