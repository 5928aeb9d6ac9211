"""One answer while it is sampled: tokens -> text up to a stop string, tool calls, the reason of its end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from whetstone.endpoint.text_stream import StopTexts, TextStream
from whetstone.environments.tools import CALL_MARKERS, answer_start, parse_calls
from whetstone.types import Finish, TopLogprobs

LONGEST_MARKER = max(map(len, CALL_MARKERS))


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
    """Tokens -> text, and what of it is special."""

    decode: Callable[[Sequence[int]], str]
    decode_special: Callable[[Sequence[int]], str]  # special tokens written out
    special_ids: frozenset[int]
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
    """`has_tools`: text that may be a call is held back until the answer has ended."""

    def __init__(self, codec: Codec, stops: Sequence[str], *, has_tools: bool) -> None:
        self._codec, self._has_tools = codec, has_tools
        self._stream, self._stops = TextStream(codec.decode), StopTexts(stops)
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
            whole = self._codec.decode(self.token_ids)
            self._text += self._stops.push(self._stream.finish(whole))
            if not self._stops.is_reached:
                self._text += self._stops.finish()
            reason = "length" if chunk.finish is Finish.LENGTH else "stop"
        if self._stops.is_reached:
            reason = "stop"
        self.is_finished = reason is not None
        calls: tuple[dict[str, Any], ...] = ()
        if self._has_tools and self.is_finished:
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
        if self._has_tools and not self._is_held:
            is_object = self._text[:100].lstrip().startswith("{")
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
        return token in self._codec.special_ids and token not in self._codec.stop_ids

    def _read_calls(self) -> tuple[str, tuple[dict[str, Any], ...]]:
        """The rest of the text and the calls, at the end of the answer."""
        calls = parse_calls(self._codec.decode_special(self.token_ids))
        rest = self._text[self._num_shown :]
        self.num_unread_calls = sum("error" in call for call in calls)
        if not calls or self.num_unread_calls:
            return rest, ()
        behind = max(0, (answer_start(self._text) or 0) - self._num_shown)
        starts = [start for marker in CALL_MARKERS if (start := rest.find(marker, behind)) >= 0]
        return (rest[: min(starts)] if starts else ""), tuple(calls)


def _may_begin_call(text: str) -> bool:
    return any(marker.startswith(text) or text.startswith(marker) for marker in CALL_MARKERS)
