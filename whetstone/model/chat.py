"""Messages -> prompt tokens, completion tokens -> text."""

import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from whetstone.config.sections import ModelConfig
from whetstone.errors import UserError
from whetstone.model.templates import ANSWER, RESULT, chat_template
from whetstone.types import Message, Problem

MAX_OBSERVATIONS = 1024  # encoded ones that are kept: the same ones come again, "too high"
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
_TAIL = 64  # tokens of a prompt's end that may open a thought
logger = logging.getLogger("whetstone")


class Chat:
    def __init__(self, tokenizer: Any, config: ModelConfig, now: str | None = None):
        """`now`: the moment that chat templates take for today, as ISO 8601 (None: the real one)."""
        self.tokenizer = tokenizer
        self.config = config
        added = getattr(tokenizer, "added_tokens_decoder", {})
        flagged = (number for number, token in added.items() if token.special)
        self.special_ids = frozenset({*tokenizer.all_special_ids, *flagged})
        self._observation = functools.lru_cache(MAX_OBSERVATIONS)(self._encode_observation)
        self._turn_end = functools.cache(self._find_turn_end)
        if config.chat_template is not None:
            tokenizer.chat_template = config.chat_template
        if config.apply_chat_template and not tokenizer.chat_template:
            raise UserError(
                f"The tokenizer of {config.model_name_or_path} has no chat template: set "
                "apply_chat_template=false (and prompt_template, if the default does not suit)."
            )
        self.template = None
        if config.apply_chat_template:
            where = config.model_name_or_path
            self.template = chat_template(tokenizer, where, config.chat_template_kwargs, now)
            if "system" not in self.template.roles:
                logger.info(f"The chat template of {where} knows no system message: it opens the user's.")
            if now is not None and self.template.writes_date:
                logger.info(f"The chat template of {where} writes the date: it stays {now[:10]} in this run.")

    @property
    def _describes_tools(self) -> bool:
        return self.template is not None and self.template.describes_tools

    def messages(self, problem: Problem) -> list[dict[str, Any]]:
        """The conversation as the chat template takes it: a system message may have to open the user's."""
        messages = self._written(problem.messages)
        roles = ("developer", "system") if self.template is None else self.template.roles
        developer, others = _without("developer", messages) if "developer" not in roles else ("", messages)
        messages = _with_system(others, developer)
        if problem.tools and not self._describes_tools:
            tools = _TOOLS.format(tools="\n".join(json.dumps(tool) for tool in problem.tools))
            messages = _with_system(messages, tools)
        system, others = _without("system", messages) if "system" not in roles else ("", messages)
        if system and others:
            others[0]["content"] = f"{system}\n\n{others[0]['content']}"
        return others

    def _written(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """What the template does not write of calls and results in a history, in the words of Qwen's."""
        template = self.template
        written: list[dict[str, Any]] = []
        for message in messages:
            if message.get("tool_calls") and not (self._describes_tools and template and template.call):
                parts = [message["content"], *map(_call_text, message["tool_calls"])]
                message = {"role": message["role"], "content": "\n".join(part for part in parts if part)}
            if message["role"] == "tool" and (template is None or template.history == "user"):
                text = f"<tool_response>\n{message['content']}\n</tool_response>"
                if written and written[-1].pop("is_result", False):  # results of one turn are one message
                    text = f"{written.pop()['content']}\n{text}"
                message = {"role": "user", "content": text, "is_result": True}
            written.append(dict(message) if template is None else template.written(message))
        return [{key: value for key, value in message.items() if key != "is_result"} for message in written]

    def prompt(self, problem: Problem, options: Mapping[str, Any] | None = None) -> str:
        """The prompt as the model sees it; `options`: further variables of the chat template."""
        if self.template is not None:
            text = self._render(problem, self.messages(problem), **(options or {}))
        else:
            system = "\n".join(message["content"] for message in self.messages(problem)[:-1])
            # str.replace, not format: questions and templates may hold braces of their own
            text = self.config.prompt_template.replace("{system}", system)
            text = text.replace("{question}", problem.question).lstrip("\n")
        return text + self.config.assistant_prefix

    def _render(self, problem: Problem, messages: Sequence[Message], **options: Any) -> str:
        assert self.template is not None
        tools = {"tools": list(map(dict, problem.tools))} if problem.tools and self._describes_tools else {}
        return self.template.render(messages, **tools, **options)

    def encode(self, problem: Problem, options: Mapping[str, Any] | None = None) -> tuple[int, ...]:
        # A chat template writes its own special tokens; a bare text needs the tokenizer's (BOS).
        special = self.template is None
        return tuple(self.tokenizer(self.prompt(problem, options), add_special_tokens=special)["input_ids"])

    def encode_solution(self, problem: Problem, solution: str | Message) -> tuple[int, ...]:
        """The tokens of the assistant's turn behind the prompt, with the token that ends it, as the chat
        template writes them. A thought that the prompt opens is closed, or ends where the solution's does.
        """
        said = {"role": "assistant", "content": solution} if isinstance(solution, str) else solution
        [said] = self._written([said])
        prefix, text, has_end = self.config.assistant_prefix, said["content"] or "", False
        prompt = self.prompt(problem).removesuffix(prefix)
        if self.template is not None:
            full, *bare = (
                self._render(problem, [*self.messages(problem), turn], add_generation_prompt=False)
                for turn in (said, {**said, "content": ""})[: 1 + bool(said.get("tool_calls"))]
            )
            text, has_end = self.template.solution(prompt, full, text, *bare, tools=problem.tools)
        text = text.removeprefix(prefix)
        start, whole = self._ids(prompt + prefix), self._ids(prompt + prefix + text)
        ids = whole[len(start) :] if whole[: len(start)] == start else self._ids(text)
        if not has_end or not self.close_turn():
            return (*ids, *self._end_of_turn)
        _, _, count = self._turn_end("call" if said.get("tool_calls") else "text")
        return tuple(ids[: len(ids) - count])  # what follows the end is never sampled

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _find_turn_end(self, history: str) -> tuple[str, tuple[int, ...], int]:
        """What the template writes behind a last assistant's message or call: the text, its tokens up to the
        end of the turn (none where it has no special token), and how many follow.
        """
        assert self.template is not None
        messages = self.template.exchange((), history)
        text = self.template.render(messages, add_generation_prompt=False).rpartition(ANSWER)[2]
        ids = self._ids(text)
        marks = [number for number, token in enumerate(ids) if token in self.special_ids]
        if not marks:
            return text, (), 0
        stop = marks[0]
        while (
            ids[stop] != self.tokenizer.eos_token_id
            and (history == "call" or stop + 1 in marks)
            and stop < marks[-1]
        ):
            stop += 1
        return text, tuple(ids[: stop + 1]), len(ids) - stop - 1

    @property
    def _end_of_turn(self) -> tuple[int, ...]:
        return self.close_turn() or (self.tokenizer.eos_token_id,)

    @property
    def call_hint(self) -> str:
        """How a call of a tool is written, for a model that wrote it otherwise."""
        if not self._describes_tools or self.template is None:
            return "write the JSON object between <tool_call> and </tool_call>"
        call = self.template.call.replace(RESULT, "f")
        return f"write it like {call}" if call else "write it in the format that the system message asks for"

    def turn(self, prompt: Sequence[int], token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The assistant's turn with what its prompt began of it, as scorers read it: thoughts in <think>."""
        template, prefix = self.template, self.config.assistant_prefix
        tail = self.decode(prompt[-_TAIL - len(prefix) :], keep_special=True).removesuffix(prefix)
        if template is None:
            opening = "<think>" * tail.rstrip().endswith("<think>")
        else:
            opening = template.opening(tail)
        if template is None or keep_special or not template.hides_thoughts:
            return opening + prefix + self.decode(token_ids, keep_special=keep_special)
        text = template.plain_thoughts(opening + prefix + self.decode(token_ids, keep_special=True))
        return self._special_text.sub("", text)

    @functools.cached_property
    def _special_text(self) -> re.Pattern[str]:
        texts = self.tokenizer.convert_ids_to_tokens(sorted(self.special_ids))
        return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))

    def encode_observation(self, messages: Sequence[Message], max_tokens: int) -> tuple[int, ...]:
        """The tokens from behind the assistant's end of turn to where it speaks again, `messages` in between.

        They are what the chat template writes there, whatever precedes: what the policy wrote is never
        rendered again, so a template that would rewrite it (drop old thoughts) does not. More than
        `max_tokens` lose their middle, with a mark in its place.
        """
        ids = self._observation(json.dumps([dict(message) for message in messages], default=str))
        if len(ids) <= max_tokens:
            return ids
        mark = self._cut_mark if max_tokens > 2 * len(self._cut_mark) else ()
        half = (max_tokens - len(mark)) // 2
        return (*ids[: max_tokens - len(mark) - half], *mark, *ids[len(ids) - half :])

    @functools.cached_property
    def _cut_mark(self) -> tuple[int, ...]:
        """In place of the middle of an observation: without it, its two ends would read as one word."""
        return tuple(self._ids(" ... "))

    def _encode_observation(self, observation: str) -> tuple[int, ...]:
        messages, template, prefix = json.loads(observation), self.template, self.config.assistant_prefix
        shown = self._written(messages)
        if template is not None:
            history = template.history if any(message["role"] == "tool" for message in messages) else "text"
            behind, end, _ = self._turn_end(history)
            text = template.render(template.exchange(shown, history)).rpartition(ANSWER)[2]
            ids = self._ids(text if end else text.removeprefix(behind))
            # The sampled turn has its end already.
            ends = [number for number, token in enumerate(ids, start=1) if token in self.special_ids]
            count = sum(token in self.special_ids for token in end)
            ids = ids[ends[count - 1] if count else 0 :]
        else:
            text = "\n".join(str(message["content"]) for message in shown)
            prompt = self.config.prompt_template.replace("{system}", "").replace("{question}", text)
            ids = self._ids("\n" + prompt.lstrip("\n"))
        return (*ids, *(self._ids(prefix) if prefix else ()))

    def close_turn(self) -> tuple[int, ...]:
        """What ends a turn that was cut off before its end, in front of an observation."""
        return () if self.template is None else self._turn_end("text")[1]

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=not keep_special)


def _without(role: str, messages: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """What messages of a role say, and the others."""
    text = "\n\n".join(message["content"] for message in messages if message["role"] == role)
    return text, [message for message in messages if message["role"] != role]


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """With `text` at the end of the system message."""
    if text and messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages] if text else messages


def _call_text(call: Message) -> str:
    function = call.get("function", call)
    content = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"<tool_call>\n{content}\n</tool_call>"
