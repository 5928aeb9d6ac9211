"""Messages -> prompt tokens, completion tokens -> text."""

import functools
import logging
from collections.abc import Sequence
from typing import Any

from whetstone.config.sections import ModelConfig
from whetstone.errors import UserError
from whetstone.model import templates
from whetstone.types import Message, Problem

ANSWER = "whetstoneanswer"  # found again in a rendered conversation
logger = logging.getLogger("whetstone")


class Chat:
    def __init__(self, tokenizer: Any, config: ModelConfig):
        self.tokenizer = tokenizer
        self.config = config
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
        if self._takes_system:
            return messages
        system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
        others = [message for message in messages if message["role"] != "system"]
        if system and others:
            others[0]["content"] = f"{system}\n\n{others[0]['content']}"
        return others

    def prompt(self, problem: Problem) -> str:
        """The prompt as the model sees it."""
        messages = self.messages(problem)
        if self.config.apply_chat_template:
            where, options = self.config.model_name_or_path, self.config.chat_template_kwargs
            tools = {"tools": [dict(tool) for tool in problem.tools]} if problem.tools else {}
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
    def _end_of_turn(self) -> tuple[int, ...]:
        """What the chat template writes behind an assistant's message, up to its first special token."""
        if self.config.apply_chat_template:
            messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
            where, options = self.config.model_name_or_path, self.config.chat_template_kwargs
            text = templates.render(self.tokenizer, messages, where, add_generation_prompt=False, **options)
            ids = self.tokenizer(text.rpartition(ANSWER)[2], add_special_tokens=False)["input_ids"]
            special = set(self.tokenizer.all_special_ids)
            end = next((i + 1 for i, token in enumerate(ids) if token in special), None)
            if end is not None:
                return tuple(ids[:end])
        return (self.tokenizer.eos_token_id,)

    def encode_observation(self, messages: Sequence[Message], max_tokens: int) -> tuple[int, ...]:
        """The tokens from behind the assistant's end of turn to where it speaks again, `messages` in between.

        They are what the chat template writes there. More than `max_tokens` lose their middle.
        """
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        if self.config.apply_chat_template:
            where, options = self.config.model_name_or_path, self.config.chat_template_kwargs
            text = templates.render(self.tokenizer, [*conversation, *messages], where, **options)
            ids = self.tokenizer(text.rpartition(ANSWER)[2], add_special_tokens=False)["input_ids"]
            end = self._end_of_turn
            ids = ids[len(end) :] if tuple(ids[: len(end)]) == end else ids
        else:
            text = "\n".join(str(message["content"]) for message in messages)
            prompt = self.config.prompt_template.replace("{system}", "").replace("{question}", text)
            ids = self.tokenizer("\n" + prompt.lstrip("\n"), add_special_tokens=False)["input_ids"]
        if self.config.assistant_prefix:
            ids = [*ids, *self.tokenizer(self.config.assistant_prefix, add_special_tokens=False)["input_ids"]]
        half = max_tokens // 2
        return tuple(ids if len(ids) <= max_tokens else [*ids[: max_tokens - half], *ids[len(ids) - half :]])

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=not keep_special)
