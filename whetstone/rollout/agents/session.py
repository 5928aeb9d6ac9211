"""What an agent and the policy said in one rollout, with its tokens.

A request that extends what was recorded has these tokens, and its new messages as the chat template writes
them: what was sampled is not tokenized again. Any other request begins a segment of its own: the agent has
rewritten its history, or has several conversations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from whetstone.endpoint.choice import ChatCodec, Choice, Codec, Delta, TokenChunk
from whetstone.endpoint.messages import template_messages
from whetstone.endpoint.protocol import ApiError
from whetstone.endpoint.text_stream import num_until_stop, num_until_token
from whetstone.errors import UserError
from whetstone.rollout.agents.calls import Call, Reply
from whetstone.rollout.episodes import without_stop
from whetstone.types import Completion, Finish, Message, Problem, Turn


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the policy is asked to continue."""

    token_ids: tuple[int, ...]
    messages: tuple[Message, ...]  # all of the conversation
    num_known: int = 0  # of the messages: those at its start that the session has
    behind: int | None = None  # the number of the turn whose tokens it begins with; None: written anew


@dataclass(frozen=True, kw_only=True)
class State:
    """What was in the policy's context when a turn had ended, the turn included."""

    token_ids: tuple[int, ...]
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]


@dataclass
class Session:
    prompt_ids: tuple[int, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)  # as they came, the first prompt's included
    last_text: str = ""  # what the policy said last
    num_sampled: int = 0  # tokens
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    _states: list[State] = field(default_factory=list)  # behind each turn
    _num_segments: int = 1
    _last: tuple[Call, Reply] | None = None

    def repeated(self, call: Call) -> Reply | None:
        """The last reply, where a client says that it repeats the last call. The same call without that mark
        asks on purpose: it is a turn.
        """
        if not call.is_repeat or self._last is None or _content(self._last[0]) != _content(call):
            return None
        return self._last[1]

    def messages_behind(self, prompt: Sequence[Message]) -> list[Message]:
        """The conversation without the problem's own messages, where it begins with them."""
        same = len(self.messages) >= len(prompt) and all(
            (own["role"], own["content"]) == (said["role"], said["content"])
            for own, said in zip(prompt, self.messages, strict=False)
        )
        return self.messages[len(prompt) :] if same else list(self.messages)

    def continues_last(self, prompt: Prompt) -> bool:
        """Whether a prompt is all that there was, with something new behind it."""
        return bool(self.turns) and prompt.behind == len(self.turns) - 1

    def prompt(self, call: Call, chat: ChatCodec, codec: Codec, max_length: int) -> Prompt:
        """The tokens that a call asks the policy to continue.

        They begin with those of the turn that has most of the call's messages behind it. Where there is none,
        the chat template writes the whole conversation.
        """
        if call.token_ids:
            return self._token_prompt(call.token_ids, chat)
        messages = tuple(template_messages(list(call.messages)))
        try:
            counts = [_num_equal(messages, state.messages) for state in self._states]
            whole = [
                number
                for number, (count, state) in enumerate(zip(counts, self._states, strict=True))
                if count == len(state.messages) < len(messages) and state.tools == tuple(call.tools)
            ]
            if not whole:
                problem = Problem(id="", task="", messages=messages, answer=None, tools=tuple(call.tools))
                known = max(counts, default=0)
                return Prompt(token_ids=chat.encode(problem), messages=messages, num_known=known)
            number = max(whole, key=lambda number: (counts[number], number))
            state = self._states[number]
            suffix = chat.encode_observation(messages[counts[number] :], max_length)
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None
        if state.token_ids[-1] not in codec.stop_ids:
            suffix = chat.close_turn() + suffix
        ids = state.token_ids + without_stop(state.token_ids, suffix)
        return Prompt(token_ids=ids, messages=messages, num_known=counts[number], behind=number)

    def _token_prompt(self, token_ids: tuple[int, ...], chat: ChatCodec) -> Prompt:
        behind, before, recorded = None, (), 0
        for number, state in enumerate(self._states):
            count = len(state.token_ids)
            if count >= recorded and token_ids[:count] == state.token_ids:
                behind, before, recorded = number, state.messages, count
        new = token_ids[recorded:]
        messages = (*before, {"role": "user", "content": chat.decode(new)}) if new else before
        return Prompt(token_ids=token_ids, messages=messages, num_known=len(before), behind=behind)

    def record(self, call: Call, prompt: Prompt, completion: Completion, codec: Codec) -> Reply:
        """Take what the policy said; the reply that the agent gets."""
        completion = _cut(call, completion, codec)
        choice = Choice(codec, call.stops, tools=call.tools, prompt=prompt.token_ids)
        delta = choice.push(
            TokenChunk(
                sample=0,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                finish=completion.finish,
            )
        )
        delta = replace(delta, tool_calls=delta.tool_calls[: call.max_calls])
        self._add_turn(prompt, completion)
        answer = _message(delta)
        state = State(
            token_ids=prompt.token_ids + completion.token_ids,
            messages=(*prompt.messages, answer),
            tools=tuple(call.tools),
        )
        self._states.append(state)
        new = [*prompt.messages[prompt.num_known :], answer]
        mark = {"segment": self._num_segments} if self._num_segments > 1 else {}
        self.messages += [{**message, **mark} for message in new]
        self.last_text = delta.text
        self.num_sampled += len(completion.token_ids)
        self.num_tool_calls += len(delta.tool_calls)
        self.num_tool_errors += choice.num_unread_calls
        reply = Reply(prompt_ids=prompt.token_ids, completion=completion, delta=delta)
        self._last = (call, reply)
        return reply

    def _add_turn(self, prompt: Prompt, completion: Completion) -> None:
        if not self.turns:
            self.prompt_ids = prompt.token_ids
            self.turns.append(Turn(completion=completion))
        elif self.continues_last(prompt):
            observation = prompt.token_ids[len(self._states[-1].token_ids) :]
            self.turns[-1] = replace(self.turns[-1], observation_ids=observation)
            self.turns.append(Turn(completion=completion))
        else:
            self._num_segments += 1
            self.turns.append(Turn(completion=completion, context_ids=prompt.token_ids))


def _content(call: Call) -> tuple[Any, ...]:
    cuts = (call.max_tokens, list(call.stops), call.stop_ids, call.max_calls)
    return list(call.messages), list(call.tools), call.token_ids, cuts


def _cut(call: Call, completion: Completion, codec: Codec) -> Completion:
    """The completion up to what the agent wants to stop at. The rest was sampled in vain."""
    ids = completion.token_ids
    counts = (num_until_stop(ids, codec.chat.decode, call.stops), num_until_token(ids, call.stop_ids))
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


def _num_equal(messages: Sequence[Message], recorded: Sequence[Message]) -> int:
    """How many messages at the start are the same."""
    pairs = enumerate(zip(messages, recorded, strict=False))
    shorter = min(len(messages), len(recorded))
    return next((number for number, (a, b) in pairs if _essence(a) != _essence(b)), shorter)


def _essence(message: Message) -> tuple[Any, ...]:
    """What of a message must come back as it was: clients change ids of calls, and space at the ends."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    called = [(call["name"], call["arguments"]) for call in calls]
    return message["role"], message["content"].strip(), called
