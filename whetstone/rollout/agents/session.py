"""What an agent and the policy said in one rollout, with its tokens.

A rollout is one conversation: a request must extend what was recorded. What was sampled is never tokenized
again; the new messages are appended as the chat template writes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from whetstone.endpoint.choice import Choice, Codec, Delta, TokenChunk
from whetstone.endpoint.messages import template_messages
from whetstone.endpoint.protocol import ApiError
from whetstone.endpoint.text_stream import num_until_stop, num_until_token
from whetstone.errors import UserError
from whetstone.rollout.agents.calls import Call, Reply
from whetstone.types import Completion, Finish, Message, Problem, Turn


class ChatCodec(Protocol):
    """The part of `model.chat.Chat` that agents need."""

    def encode(self, problem: Problem) -> tuple[int, ...]: ...
    def encode_observation(self, messages: Sequence[Message], max_tokens: int) -> tuple[int, ...]: ...
    def close_turn(self) -> tuple[int, ...]: ...
    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the policy is asked to continue."""

    token_ids: tuple[int, ...]
    num_recorded: int  # of these tokens: what the session has; the rest is new
    messages: tuple[Message, ...]  # that are new


@dataclass
class Session:
    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()  # the prompt and all turns so far
    messages: list[Message] = field(default_factory=list)  # the prompt's included
    tools: tuple[Mapping[str, Any], ...] = ()
    completions: list[Completion] = field(default_factory=list)
    observations: list[tuple[int, ...]] = field(default_factory=list)  # between the completions
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    _last: tuple[Call, Reply] | None = None

    @property
    def num_sampled(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def last_text(self) -> str:
        """What the policy said last."""
        said = [message["content"] for message in self.messages if message["role"] == "assistant"]
        return said[-1] if said and self.completions else ""

    def turns(self) -> tuple[Turn, ...]:
        pairs = zip(self.completions, [*self.observations, ()], strict=True)
        return tuple(Turn(completion=completion, observation_ids=ids) for completion, ids in pairs)

    def repeated(self, call: Call) -> Reply | None:
        """The last reply, where the call is the last one again: clients repeat what they lost."""
        if self._last is None or _content(self._last[0]) != _content(call):
            return None
        return self._last[1]

    def messages_behind(self, prompt: Sequence[Message]) -> list[Message]:
        """The conversation without the problem's own messages, where it begins with them."""
        same = len(self.messages) >= len(prompt) and all(
            (own["role"], own["content"]) == (said["role"], said["content"])
            for own, said in zip(prompt, self.messages, strict=False)
        )
        return self.messages[len(prompt) :] if same else list(self.messages)

    def prompt(self, call: Call, chat: ChatCodec, codec: Codec, max_length: int) -> Prompt:
        """The tokens that a call asks the policy to continue; `ApiError` where they do not extend ours."""
        if call.token_ids:
            return self._token_prompt(call.token_ids, chat)
        messages = template_messages(list(call.messages))
        try:
            if not self.completions:
                problem = Problem(
                    id="", task="", messages=tuple(messages), answer=None, tools=tuple(call.tools)
                )
                return Prompt(token_ids=chat.encode(problem), num_recorded=0, messages=tuple(messages))
            count = len(self.messages)
            if tuple(call.tools) != self.tools or not _begins_with(messages, self.messages):
                raise _not_extended()
            if len(messages) == count:
                raise _not_extended()
            suffix = chat.encode_observation(messages[count:], max_length)
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None
        if self.token_ids[-1] not in codec.stop_ids:
            suffix = chat.close_turn() + suffix
        ids = self.token_ids + suffix
        return Prompt(token_ids=ids, num_recorded=len(self.token_ids), messages=tuple(messages[count:]))

    def _token_prompt(self, token_ids: tuple[int, ...], chat: ChatCodec) -> Prompt:
        count = len(self.token_ids)
        if token_ids[:count] != self.token_ids or len(token_ids) == count > 0:
            raise _not_extended("token_ids")
        message = {"role": "user", "content": chat.decode(token_ids[count:])}
        return Prompt(token_ids=token_ids, num_recorded=count, messages=(message,))

    def record(self, call: Call, prompt: Prompt, completion: Completion, codec: Codec) -> Reply:
        """Take what the policy said; the reply that the agent gets."""
        completion = _cut(call, completion, codec)
        choice = Choice(codec, call.stops, has_tools=bool(call.tools))
        delta = choice.push(
            TokenChunk(
                sample=0,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                finish=completion.finish,
            )
        )
        delta = replace(delta, tool_calls=delta.tool_calls[: call.max_calls])
        if not self.completions:
            self.prompt_ids, self.tools = prompt.token_ids, tuple(call.tools)
        else:
            self.observations.append(prompt.token_ids[prompt.num_recorded :])
        self.completions.append(completion)
        self.token_ids = prompt.token_ids + completion.token_ids
        self.messages += [*prompt.messages, _message(delta)]
        self.num_tool_calls += len(delta.tool_calls)
        self.num_tool_errors += choice.num_unread_calls
        reply = Reply(prompt_ids=prompt.token_ids, completion=completion, delta=delta)
        self._last = (call, reply)
        return reply


def _content(call: Call) -> tuple[Any, ...]:
    cuts = (call.max_tokens, list(call.stops), call.stop_ids, call.max_calls)
    return list(call.messages), list(call.tools), call.token_ids, cuts


def _cut(call: Call, completion: Completion, codec: Codec) -> Completion:
    """The completion up to what the agent wants to stop at. The rest was sampled in vain."""
    ids = completion.token_ids
    counts = (num_until_stop(ids, codec.decode, call.stops), num_until_token(ids, call.stop_ids))
    count = min((count for count in counts if count is not None), default=None)
    if count is None:
        return completion
    return Completion(
        token_ids=ids[:count],
        logprobs=completion.logprobs[:count],
        finish=Finish.STOP,
        policy_version=completion.policy_version,
    )


def _message(delta: Delta) -> Message:
    """What the agent was told that the policy said; with calls as chat templates and pages have them."""
    message: dict[str, Any] = {"role": "assistant", "content": delta.text}
    return (
        {**message, "tool_calls": [dict(call) for call in delta.tool_calls]} if delta.tool_calls else message
    )


def _begins_with(messages: Sequence[Message], recorded: Sequence[Message]) -> bool:
    pairs = zip(messages, recorded, strict=False)
    return len(messages) >= len(recorded) and all(_essence(a) == _essence(b) for a, b in pairs)


def _essence(message: Message) -> tuple[Any, ...]:
    """What of a message must come back as it was: clients change ids of calls, and space at the ends."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    called = [(call["name"], call["arguments"]) for call in calls]
    return message["role"], message["content"].strip(), called


def _not_extended(param: str = "messages") -> ApiError:
    return ApiError(
        400,
        "A session is one conversation: send all of its messages as they were, with the same tools, and new "
        "ones behind the policy's last answer.",
        param=param,
        code="not_an_extension",
    )
