"""What a model's chat template does, found by rendering short conversations and reading them back.

Chat templates are untrusted programs in Jinja. transformers renders them in an immutable sandbox, but without
limits: a process with limits of time and memory (limited.py) renders all prompts of a run. Nothing else looks
at the text of a template.
"""

import contextlib
import functools
import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from whetstone.environments.calls import THOUGHTS, answer_start, parse_calls
from whetstone.errors import UserError, did_you_mean
from whetstone.model.limited import ask
from whetstone.types import Message, common_length

MAX_MEMORY = 1 << 30
TRIAL_S, RENDER_S = 3.0, 20.0  # CPU time of a short question, and of any prompt
TRIAL_TEXT, MAX_TEXT = 1_000_000, 20_000_000  # characters
# Found again in a rendered conversation; two are drawn anew, so that no template can know that it is tried.
SYSTEM, QUESTION = secrets.token_hex(8), secrets.token_hex(8)
ANSWER, RESULT, THOUGHT = "whetstoneanswer", "whetstoneresult", "whetstonethought"
CALL_ID = "whetstone"  # nine letters, as Mistral's templates want them
ASK: Message = {"role": "user", "content": QUESTION}
SAY: Message = {"role": "assistant", "content": ANSWER}
_X = {"type": "object", "properties": {"x": {"type": "integer", "description": "?"}}}
PROBE = {"type": "function", "function": {"name": RESULT, "description": "?", "parameters": _X}}
_OURS = {"messages", "tools", "add_generation_prompt", "conversations", "chat_template", "max_text", "now"}
_UNFINISHED_TAG = re.compile(r"[<\[][^<>\[\]\s]*$")
_LAST_TAG = re.compile(r"(?:<[^<>]+>|\[[^\[\]]+\])\w*\s*$")
_NEXT_TAG = re.compile(r"\s*+<[^<>]++>\s*+")
logger = logging.getLogger("whetstone")


class ChatTemplate:
    def __init__(
        self, where: str, texts: tuple[str, str], tokens: str, options: str, now: str | None
    ) -> None:
        """`texts`: without and with tools; `tokens`: special ones; `now`: its today (None: the real one)."""
        self.where, self._texts, self.now = where, texts, now
        self._tokens, self._options = json.loads(tokens), json.loads(options)
        remedy = "repair it (chat_template.jinja or tokenizer_config.json), or set apply_chat_template=false."
        alone = self._ask([ASK], True, {}, TRIAL_S, TRIAL_TEXT)
        if alone is None:
            reason = "takes too much time or memory for a short question"
        elif "error" in alone:
            reason = f"can't be used ({alone['error']})"
        elif QUESTION not in alone["text"]:
            reason = "leaves the user's message out"
        else:
            self._prompt = alone["text"]
            return self.check_options(self._options)
        raise UserError(f"The chat template of {where} {reason}: {remedy}")

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """The conversation, as transformers renders it, within the limits."""
        answer = self._ask(messages, add_generation_prompt, options, RENDER_S, MAX_TEXT)
        if answer is not None and "text" in answer:
            return answer["text"]
        reason = f"ran for {RENDER_S:g} s" if answer is None else f"failed ({answer['error']})"
        raise UserError(
            f"The chat template of {self.where} {reason} on a prompt: repair it, or set "
            "apply_chat_template=false."
        )

    def _ask(
        self, messages: Sequence[Message], add: bool, options: Mapping[str, Any], seconds: float, size: int
    ) -> dict[str, str] | None:
        request = {**self._tokens, **self._options, **options, "conversations": [messages], "now": self.now}
        request |= {"chat_template": self._texts[bool(options.get("tools"))]}
        return ask("template", seconds, MAX_MEMORY, max_text=size, add_generation_prompt=add, **request)

    def _try(self, *messages: Message, add: bool = False, **options: Any) -> str:
        """A short conversation; empty where the template refuses it."""
        return (self._ask(messages, add, options, TRIAL_S, TRIAL_TEXT) or {}).get("text", "")

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuse variables that the template does not know, and a text for true or false."""
        known = self._names - _OURS - {"strftime_now", *self._tokens}
        for name, value in options.items():
            start = f"chat_template_kwargs sets {name}"
            if name not in known:
                hint = did_you_mean(name, known) or ": leave it out."
                raise UserError(f"{start}, which the chat template of {self.where} does not know{hint}")
            if isinstance(value, str) and value.lower() in ("true", "false"):
                reason = f"to the text '{value}', which counts as true: write it without quotes."
                raise UserError(f"{start} {reason}")

    @functools.cached_property
    def _names(self) -> set[str]:
        """The variables and functions that it reads."""
        answers = [ask("names", TRIAL_S, MAX_MEMORY, text=text) or {} for text in set(self._texts)]
        return {name for answer in answers for name in answer.get("text", "").split()}

    @property
    def writes_date(self) -> bool:
        return "strftime_now" in self._names

    @functools.cached_property
    def roles(self) -> list[str]:
        """Which of system and developer it renders."""
        tried = {role: self._try({"role": role, "content": SYSTEM}, ASK) for role in ("system", "developer")}
        return [role for role, text in tried.items() if SYSTEM in text]

    @functools.cached_property
    def _thought(self) -> tuple[str, str, bool]:
        """What stands before and behind a thought, and whether it writes `reasoning_content`."""
        for beside in (SAY, _calling(RESULT, 1)):  # Gemma 4 writes the field beside a call alone
            before, _, behind = self._try(ASK, {**beside, "reasoning_content": THOUGHT}).partition(THOUGHT)
            begin = _parted(self._prompt, before)[1] or "".join(_LAST_TAG.findall(before))
            if ANSWER in behind:
                return begin, behind.partition(ANSWER)[0], True
            if tag := _NEXT_TAG.match(behind):
                return begin, tag[0], False
        end = self._prompt.rstrip()
        tag = next((tag for tag in THOUGHTS if end.endswith(tag)), "<think>")
        return tag + (self._prompt[len(end) :] or "\n"), f"\n{THOUGHTS[tag]}\n\n", False

    def opening(self, prompt: str) -> str:
        """The end of a prompt that opens a thought; empty where it opens none."""
        begin = self._thought[0]
        return begin if prompt.endswith(begin) else ""

    @property
    def hides_thoughts(self) -> bool:
        """Whether their tags are not `<think>`, but special tokens, which a decoded text lacks."""
        return "<think>" not in self._thought[0]

    def plain_thoughts(self, text: str) -> str:
        """A turn with its special tokens -> its thoughts in <think>."""
        begin, end, _ = self._thought
        return text.replace(begin.strip(), "<think>").replace(end.strip(), "</think>").replace(self._lead, "")

    @functools.cached_property
    def _lead(self) -> str:
        """What stands between a prompt and an answer without a thought."""
        return _parted(self._prompt, self._try(ASK, SAY))[1].partition(ANSWER)[0]

    def written(self, message: Message) -> dict[str, Any]:
        """A message with its calls and thoughts as the template takes them."""
        begin, end, takes_thoughts = self._thought
        message, content = dict(message), message.get("content") or ""
        if self.hides_thoughts and content.startswith("<think>") and "</think>" in content:
            thought, _, content = content.removeprefix("<think>").partition("</think>")
            message["reasoning_content"], content = thought.strip(), content.lstrip("\n")
        if not takes_thoughts and (thought := message.pop("reasoning_content", None)):
            content = f"{begin}{thought.strip()}{end}{content}"
        if message.get("tool_calls"):
            message["tool_calls"] = list(map(_function, message["tool_calls"]))
        return {**message, "content": content}

    def solution(
        self, prompt: str, full: str, said: str, bare: str = "", tools: Any = ()
    ) -> tuple[str, bool]:
        """What follows `prompt` in the conversation with its answer, and whether that ends the turn: not if
        the template leaves out a part of `said`, which follows as it is, with the calls of `bare`, the
        conversation without it, if they can be read there.
        """
        head, tail = _parted(prompt, full)
        end, opening = self._thought[1], self.opening(prompt)
        tail = _behind(head, tail)
        if opening and end.strip() not in tail:
            tail = end + _behind(end, tail)
        is_whole = "".join(said.split()) in "".join((opening + tail).split())
        if is_whole and len(head) <= len(self._prompt.partition(QUESTION)[2]):
            return tail, True
        text = end + said if opening and end.strip() not in said else _behind(opening, said)
        if not bare:
            return text, False
        alone, is_whole = self.solution(prompt, bare, "")
        if not is_whole:
            raise UserError(
                f"The chat template of {self.where} rewrites a prompt before a call: choose another."
            )
        calls = alone.partition(end.strip())[2] if opening else alone
        return text + calls if parse_calls(f"{opening}{text}{calls}", tools) else alone, True

    @functools.cached_property
    def call(self) -> str:
        """`RESULT(x=4127)` as it writes it, behind a prompt; empty where it writes no calls."""
        full = self._try(ASK, _calling(RESULT, 4127), tools=[PROBE])
        text = _parted(self._try(ASK, add=True, tools=[PROBE]), full)[1]
        text = text.partition(self._tokens.get("eos_token") or "\0")[0]
        return text[answer_start(text) or 0 :].strip() if "4127" in text else ""

    @functools.cached_property
    def describes_tools(self) -> bool:
        """Whether it tells the model about tools; otherwise the system message does."""
        if RESULT not in self._try(ASK, add=True, tools=[PROBE]):
            return False
        if self.call and parse_calls(self.call, [PROBE]) != [{"name": RESULT, "arguments": {"x": 4127}}]:
            logger.warning(
                f"The chat template of {self.where} writes a call as {self.call!r}, which can't be read, so "
                "the model's calls are not found: set chat_template to one that writes <tool_call>, or "
                "tool_call_format=code_block."
            )
        return True

    @functools.cached_property
    def history(self) -> str:
        """How a tool's result is put behind an assistant's message: after a `call`, after `text`, or as a
        message of the `user`, where the template has no other way.
        """
        result = {"role": "tool", "name": "f", "content": RESULT}
        for history in ("call", "text") if self.describes_tools else ():
            if RESULT in self._try(*self.exchange([result], history), add=True).partition(ANSWER)[2]:
                return history
        return "user"

    def exchange(self, messages: Sequence[Message], history: str) -> list[Message]:
        """A short conversation that ends in `messages`; what precedes them has `ANSWER` at its end."""
        if history != "call":
            return [ASK, SAY, *messages]
        name = next((str(message.get("name") or "f") for message in messages), "f")
        return [ASK, _calling(name, ANSWER), *({**message, "tool_call_id": CALL_ID} for message in messages)]


_template = functools.lru_cache(maxsize=32)(ChatTemplate)


def chat_template(tokenizer: Any, where: str, options: Any, now: str | None = None) -> ChatTemplate:
    """The tokenizer's template, tried. One that fails is refused."""
    try:
        texts = (tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[PROBE]))
        tokens = json.dumps(tokenizer.special_tokens_map, default=str)
    except Exception as error:  # several templates and no default, or something that is none
        raise UserError(
            f"The tokenizer of {where} has no chat template to use ({error}): set apply_chat_template=false."
        ) from None
    return _template(where, texts, tokens, json.dumps(options, default=str), now)


def _parted(prompt: str, full: str) -> tuple[str, str]:
    """What each has behind their common beginning, which ends before a tag that only one of them has."""
    count = common_length(prompt, full)
    tag = _UNFINISHED_TAG.search(prompt, max(0, count - 100), count)
    count = tag.start() if tag else count
    return prompt[count:], full[count:]


def _behind(before: str, text: str) -> str:
    """`text` without what `before` ends with already."""
    return next(text[len(part) :] for n in range(len(before) + 1) if text.startswith(part := before[n:]))


def _calling(name: str, x: Any) -> Message:
    return {**SAY, "content": "", "tool_calls": [_function({"name": name, "arguments": {"x": x}})]}


def _function(call: Message) -> dict[str, Any]:
    """A call in OpenAI's shape, its arguments as an object."""
    function = call.get("function", call)
    arguments = function["arguments"]
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    written = {"name": function["name"], "arguments": arguments}
    return {"id": call.get("id") or CALL_ID, "type": "function", "function": written}
