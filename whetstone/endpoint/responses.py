"""Answers in OpenAI's shapes: whole ones, and the chunks of streams."""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from whetstone.endpoint.choice import Delta


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How the answers to one request are written."""

    token_text: Callable[[int], str]  # a token as `logprobs` write it
    model: str
    is_chat: bool
    has_logprobs: bool
    has_token_ids: bool
    includes_usage: bool
    prompts: list[tuple[int, ...]]
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self, num_tokens: int) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": num_tokens, "total_tokens": prompt + num_tokens}

    def whole(self, answers: Sequence[Sequence[Delta]], num_tokens: int) -> dict[str, Any]:
        """All samples, each by the pieces that came of it."""
        choices = [self._whole_choice(index, deltas) for index, deltas in enumerate(answers)]
        body = self._head("chat.completion" if self.is_chat else "text_completion")
        body |= {"choices": choices, "usage": self.usage(num_tokens)}
        if self.has_token_ids:
            body["prompt_token_ids"] = list(self.prompts[0])
        return body

    def first_chunk(self, index: int) -> dict[str, Any]:
        """A stream of chat begins with the role of each sample."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, index: int, delta: Delta, num_before: int) -> dict[str, Any]:
        """`num_before`: characters of the sample that were sent before."""
        logprobs = self._logprobs([delta], num_before) if self.has_logprobs else None
        if self.is_chat:
            content: dict[str, Any] = {"content": delta.text} if delta.text else {}
            if delta.tool_calls:
                content["tool_calls"] = [
                    {"index": number, **call} for number, call in enumerate(_calls(delta))
                ]
        else:
            content = {"text": delta.text}
        body = self._chunk(index, content, delta.finish_reason, logprobs)
        if self.has_token_ids:
            body["choices"][0]["token_ids"] = list(delta.token_ids)
        return body

    def usage_chunk(self, num_tokens: int) -> dict[str, Any]:
        return {**self._head(self._chunk_kind), "choices": [], "usage": self.usage(num_tokens)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _chunk(
        self, index: int, content: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        choice = {"index": index, **({"delta": content} if self.is_chat else content)}
        choice |= {"logprobs": logprobs, "finish_reason": reason}
        body = {**self._head(self._chunk_kind), "choices": [choice]}
        return {**body, "usage": None} if self.includes_usage else body

    def _whole_choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        calls = [call for delta in deltas for call in _calls(delta)]
        choice: dict[str, Any] = {"index": index}
        if self.is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text}
            choice["message"] = {**message, "tool_calls": calls} if calls else message
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(deltas, 0) if self.has_logprobs else None
        choice["finish_reason"] = deltas[-1].finish_reason
        if self.has_token_ids:
            choice["token_ids"] = [token for delta in deltas for token in delta.token_ids]
        return choice

    def _logprobs(self, deltas: Sequence[Delta], num_before: int) -> dict[str, Any]:
        tokens = [self.token_text(token) for delta in deltas for token in delta.token_ids]
        logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
        best = [
            [(self.token_text(token), logprob) for token, logprob in top]
            for delta in deltas
            for top in delta.top or ((),) * len(delta.token_ids)
        ]
        if self.is_chat:
            content = [
                {**_entry(text, logprob), "top_logprobs": [_entry(*pair) for pair in top]}
                for text, logprob, top in zip(tokens, logprobs, best, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets, position = [], num_before
        for text in tokens:
            offsets.append(position)
            position += len(text)
        tables = [
            {text: logprob, **dict(reversed(top))}  # of two tokens with one text, the likelier
            for text, logprob, top in zip(tokens, logprobs, best, strict=True)
        ]
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tables if any(best) else None,
            "text_offset": offsets,
        }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _calls(delta: Delta) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for call in delta.tool_calls
    ]


def generate_choice(
    index: int, token_ids: Sequence[int], logprobs: Sequence[float], reason: str, *, has_logprobs: bool
) -> dict[str, Any]:
    """A choice of vLLM's `/inference/v1/generate`: the stop token included, no text."""
    content = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(token_ids, logprobs, strict=True)
    ]
    return {
        "index": index,
        "logprobs": {"content": content} if has_logprobs else None,
        "finish_reason": reason,
        "token_ids": list(token_ids),
    }


def generate_body(request_id: str | None, num_prompt: int, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer of vLLM's `/inference/v1/generate`."""
    num_tokens = sum(len(choice["token_ids"]) for choice in choices)
    return {
        "request_id": request_id or secrets.token_hex(16),
        "choices": choices,
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
        },
    }
