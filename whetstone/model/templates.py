"""Chat templates of model folders: untrusted programs in Jinja, rendered within limits.

transformers renders them in an immutable sandbox, but without limits. So a process with limits of time and
memory (limited.py) renders all prompts of a run. A template that knows no system role gets the
system message as part of the user's.
"""

import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from whetstone.errors import UserError
from whetstone.model.limited import ask

MAX_MEMORY = 1 << 30
TRIAL_S, RENDER_S = 3.0, 20.0  # CPU time of a short question, and of any prompt
TRIAL_TEXT, MAX_TEXT = 1_000_000, 20_000_000  # characters
# Drawn anew, so that no template can know that it is tried.
SYSTEM, QUESTION = secrets.token_hex(8), secrets.token_hex(8)


def takes_system(tokenizer: Any, where: str) -> bool:
    """Try the tokenizer's template; whether it renders a system message. A template that fails is refused."""
    try:
        template = tokenizer.get_chat_template()
        tokens = json.dumps(tokenizer.special_tokens_map, default=str)
    except Exception as error:  # several templates and no default, or something that is none
        raise UserError(
            f"The tokenizer of {where} has no chat template to use ({error}): set apply_chat_template=false."
        ) from None
    return _try(template, tokens, where)


@functools.lru_cache(maxsize=32)
def _try(template: str, tokens: str, where: str) -> bool:
    user = {"role": "user", "content": QUESTION}
    both = [{"role": "system", "content": SYSTEM}, user]
    remedy = "repair it (chat_template.jinja or tokenizer_config.json), or set apply_chat_template=false."
    request = {**json.loads(tokens), "chat_template": template, "add_generation_prompt": True}
    alone, together = (
        _ask({**request, "conversations": [messages]}, TRIAL_S, TRIAL_TEXT) for messages in ([user], both)
    )
    if alone is None:
        raise UserError(
            f"The chat template of {where} takes too much time or memory for a short question: {remedy}"
        )
    if "error" in alone:
        raise UserError(f"The chat template of {where} can't be used ({alone['error']}): {remedy}")
    if QUESTION not in alone["text"]:
        raise UserError(f"The chat template of {where} leaves the user's message out: {remedy}")
    return together is not None and SYSTEM in together.get("text", "")


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    where: str,
    *,
    add_generation_prompt: bool = True,
    **options: Any,
) -> str:
    """The prompt, as transformers renders it, within the limits; `options` are the template's own."""
    template = tokenizer.get_chat_template(tools=options.get("tools"))
    request = {**tokenizer.special_tokens_map, **options, "conversations": [messages]}
    request |= {"chat_template": template, "add_generation_prompt": add_generation_prompt}
    answer = _ask(request, RENDER_S, MAX_TEXT)
    if answer is not None and "text" in answer:
        return answer["text"]
    reason = f"ran for {RENDER_S:g} s" if answer is None else f"failed ({answer['error']})"
    raise UserError(
        f"The chat template of {where} {reason} on a prompt: repair it, or set apply_chat_template=false."
    )


def _ask(request: Mapping[str, Any], seconds: float, max_text: int) -> dict[str, str] | None:
    return ask("template", seconds, MAX_MEMORY, max_text=max_text, **request)
