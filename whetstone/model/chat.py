"""Messages -> prompt tokens, completion tokens -> text."""

import functools
import json
import logging
from collections.abc import Sequence
from typing import Any

from whetstone.config.sections import ModelConfig
from whetstone.errors import UserError
from whetstone.model import templates
from whetstone.types import Message, Problem

ANSWER, RESULT = "whetstoneanswer", "whetstoneresult"  # found again in a rendered conversation
MAX_OBSERVATIONS, MAX_OBSERVATION = 4096, 2000  # encoded ones that are kept, and characters of each
CALL_ID = "whetstone"  # nine letters, as Mistral's templates want them
# What Qwen's template says about tools, for templates that say nothing.
_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_PROBE = {
    "type": "function",
    "function": {"name": RESULT, "description": "?", "parameters": {"type": "object", "properties": {}}},
}
logger = logging.getLogger("whetstone")


class Chat:
    def __init__(self, tokenizer: Any, config: ModelConfig):
        self.tokenizer = tokenizer
        self.config = config
        self._observations: dict[str, tuple[int, ...]] = {}
        if config.chat_template is not None:
            tokenizer.chat_template = config.chat_template
        if config.apply_chat_template and not tokenizer.chat_template:
            raise UserError(
                f"The tokenizer of {config.model_name_or_path} has no chat template: set "
                "apply_chat_template=false (and prompt_template, if the default does not suit)."
            )
        self._takes_system = True
        if config.apply_chat_template:
            where = config.model_name_or_path
            self._takes_system = templates.takes_system(tokenizer, where)
            if not self._takes_system:
                logger.info(f"The chat template of {where} knows no system message: it opens the user's.")

    def messages(self, problem: Problem) -> list[dict[str, str]]:
        """The conversation as the chat template takes it: a system message may have to open the user's."""
        messages = [dict(message) for message in problem.messages]
        if any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
            messages = self._with_calls_as_text(messages)
        if problem.tools and not self._describes_tools:
            messages = _with_tools(messages, problem.tools)
        if self._takes_system:
            return messages
        system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
        others = [message for message in messages if message["role"] != "system"]
        if system and others:
            others[0]["content"] = f"{system}\n\n{others[0]['content']}"
        return others

    def _with_calls_as_text(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What the template does not write of calls and results in a history, in the words of Qwen's."""
        written: list[dict[str, Any]] = []
        for message in messages:
            calls = message.get("tool_calls")
            if calls and not self._describes_tools:
                parts = [message["content"], *map(_call_text, calls)]
                message = {"role": message["role"], "content": "\n".join(part for part in parts if part)}
            if message["role"] == "tool" and self._tool_history == "user":
                text = _result_text(message)
                if written and written[-1].pop("is_result", False):  # results of one turn are one message
                    text = f"{written.pop()['content']}\n{text}"
                message = {"role": "user", "content": text, "is_result": True}
            written.append(message)
        return [{key: value for key, value in message.items() if key != "is_result"} for message in written]

    def prompt(self, problem: Problem) -> str:
        """The prompt as the model sees it."""
        messages = self.messages(problem)
        if self.config.apply_chat_template:
            where, options = self.config.model_name_or_path, self.config.chat_template_kwargs
            tools = {}
            if problem.tools and self._describes_tools:
                tools = {"tools": [dict(tool) for tool in problem.tools]}
            text = templates.render(self.tokenizer, messages, where, **tools, **options)
        else:
            system = "\n".join(message["content"] for message in messages[:-1])
            # str.replace, not format: questions and templates may hold braces of their own
            text = self.config.prompt_template.replace("{system}", system)
            text = text.replace("{question}", problem.question).lstrip("\n")
        return text + self.config.assistant_prefix

    def encode(self, problem: Problem) -> tuple[int, ...]:
        # A chat template writes its own special tokens; a bare text needs the tokenizer's (BOS).
        special = not self.config.apply_chat_template
        return tuple(self.tokenizer(self.prompt(problem), add_special_tokens=special)["input_ids"])

    def encode_solution(self, problem: Problem, solution: str) -> tuple[int, ...]:
        """The tokens of the assistant's turn behind the prompt, with the token that ends it."""
        text = solution.removeprefix(self.config.assistant_prefix)
        return (*self.tokenizer(text, add_special_tokens=False)["input_ids"], *self._end_of_turn)

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        flagged = (number for number, token in added.items() if token.special)
        return frozenset({*self.tokenizer.all_special_ids, *flagged})

    @functools.cached_property
    def _written_end(self) -> tuple[int, ...] | None:
        """What the chat template writes behind a last assistant's message, up to its first special token."""
        text = self._render(
            [_QUESTION, {"role": "assistant", "content": ANSWER}], add_generation_prompt=False
        )
        ids = self.tokenizer(text.rpartition(ANSWER)[2], add_special_tokens=False)["input_ids"]
        end = next((i + 1 for i, token in enumerate(ids) if token in self._special), None)
        return None if end is None else tuple(ids[:end])

    @property
    def _end_of_turn(self) -> tuple[int, ...]:
        end = self._written_end if self.config.apply_chat_template else None
        return (self.tokenizer.eos_token_id,) if end is None else end

    @functools.cached_property
    def _describes_tools(self) -> bool:
        """Whether the chat template tells the model about tools; otherwise the system message does."""
        try:
            return RESULT in self._render([_QUESTION], tools=[_PROBE])
        except UserError:
            return False

    @functools.cached_property
    def _asks_for_tags(self) -> bool:
        """Whether calls are to be written as `<tool_call>`."""
        return not self._describes_tools or "</tool_call>" in self._render([_QUESTION], tools=[_PROBE])

    @property
    def call_hint(self) -> str:
        """How a call of a tool is written, for a model that wrote it otherwise."""
        if self._asks_for_tags:
            return "write the JSON object between <tool_call> and </tool_call>"
        return "write it in the format that the system message asks for"

    @functools.cached_property
    def _tool_history(self) -> str:
        """How a tool's result is put behind an assistant's message: after a `call`, after `text`, or as a
        message of the `user`, where the template has no other way.
        """
        if self._describes_tools:
            for history in ("call", "text"):
                try:
                    text = self._render(_history([{"role": "tool", "name": "f", "content": RESULT}], history))
                except UserError:
                    continue
                if RESULT in text.rpartition(ANSWER)[2]:
                    return history
        return "user"

    def _render(self, messages: Sequence[Message], **options: Any) -> str:
        where = self.config.model_name_or_path
        return templates.render(
            self.tokenizer, messages, where, **options, **self.config.chat_template_kwargs
        )

    def encode_observation(self, messages: Sequence[Message], max_tokens: int) -> tuple[int, ...]:
        """The tokens from behind the assistant's end of turn to where it speaks again, `messages` in between.

        They are what the chat template writes there, whatever precedes: what the policy wrote is never
        rendered again, so a template that would rewrite it (drop old thoughts) does not. More than
        `max_tokens` lose their middle, with a mark in its place.
        """
        key = json.dumps(messages, default=repr)  # the same ones come again: "too high"
        ids = self._observations.get(key)
        if ids is None:
            ids = self._encode_observation(messages)
            if len(key) <= MAX_OBSERVATION:
                if len(self._observations) >= MAX_OBSERVATIONS:
                    self._observations.clear()
                self._observations[key] = ids
        if len(ids) <= max_tokens:
            return ids
        mark = self._cut_mark if max_tokens > 2 * len(self._cut_mark) else ()
        half = (max_tokens - len(mark)) // 2
        return (*ids[: max_tokens - len(mark) - half], *mark, *ids[len(ids) - half :])

    @functools.cached_property
    def _cut_mark(self) -> tuple[int, ...]:
        """In place of the middle of an observation: without it, its two ends would read as one word."""
        return tuple(self.tokenizer(" ... ", add_special_tokens=False)["input_ids"])

    def _encode_observation(self, messages: Sequence[Message]) -> tuple[int, ...]:
        if self.config.apply_chat_template:
            has_tools = any(message["role"] == "tool" for message in messages)
            text = self._render(_history(messages, self._tool_history if has_tools else "text"))
            ids = self.tokenizer(text.rpartition(ANSWER)[2], add_special_tokens=False)["input_ids"]
            if self._written_end is not None:  # the sampled turn has its end already
                ids = ids[next((i + 1 for i, token in enumerate(ids) if token in self._special), 0) :]
        else:
            text = "\n".join(str(message["content"]) for message in messages)
            prompt = self.config.prompt_template.replace("{system}", "").replace("{question}", text)
            ids = self.tokenizer("\n" + prompt.lstrip("\n"), add_special_tokens=False)["input_ids"]
        if self.config.assistant_prefix:
            ids = [*ids, *self.tokenizer(self.config.assistant_prefix, add_special_tokens=False)["input_ids"]]
        return tuple(ids)

    def close_turn(self) -> tuple[int, ...]:
        """What ends a turn that was cut off before its end, in front of an observation."""
        return (self._written_end or ()) if self.config.apply_chat_template else ()

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=not keep_special)


_QUESTION = {"role": "user", "content": "?"}


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[Message]) -> list[dict[str, Any]]:
    """The tools described in the system message, in Qwen's words."""
    text = _TOOLS.format(tools="\n".join(json.dumps(tool) for tool in tools))
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _history(messages: Sequence[Message], history: str) -> list[dict[str, Any]]:
    """A short conversation that ends in `messages`; what precedes them has `ANSWER` at its end."""
    if history == "call":
        function = {"name": str(messages[0].get("name") or "f"), "arguments": {"x": ANSWER}}
        call = {"id": CALL_ID, "type": "function", "function": function}
        results = [{**message, "tool_call_id": CALL_ID} for message in messages]
        return [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, *results]
    before = [_QUESTION, {"role": "assistant", "content": ANSWER}]
    if history == "text":
        return [*before, *map(dict, messages)]
    parts = [
        _result_text(message) if message["role"] == "tool" else str(message["content"])
        for message in messages
    ]
    return [*before, {"role": "user", "content": "\n".join(parts)}]


def _result_text(message: Message) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _call_text(call: Message) -> str:
    function = call.get("function", call)
    content = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"<tool_call>\n{content}\n</tool_call>"
