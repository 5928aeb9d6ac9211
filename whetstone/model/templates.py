"""Chat templates of model folders: untrusted programs in Jinja, rendered within limits.

transformers renders them in an immutable sandbox, but without limits. So a template is tried once in a
process of its own (template_trial.py), and later renderings are stopped after some seconds. A template that
knows no system role gets the system message as part of the user's.
"""

import contextlib
import functools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from whetstone.errors import UserError

TRIAL_S = 60.0  # wall clock; the trial itself may take 3 s of CPU time
RENDER_S = 20.0  # CPU time of this thread
MAX_TEXT = 20_000_000  # characters of one prompt
SYSTEM, QUESTION = "whetstonesystemmessage", "whetstonequestion"


class RanTooLong(Exception):
    """A rendering that was stopped."""


def takes_system(tokenizer: Any, where: str) -> bool:
    """Try the tokenizer's template; whether it renders a system message. A template that fails is refused."""
    try:
        template = tokenizer.get_chat_template()
        special = tokenizer.special_tokens_map.items()
        tokens = sorted((name, token) for name, token in special if isinstance(token, str))
    except Exception as error:  # several templates and no default, or something that is none
        raise UserError(
            f"The tokenizer of {where} has no chat template to use ({error}): set apply_chat_template=false."
        ) from None
    return _try(template, tuple(tokens), where)


@functools.lru_cache(maxsize=32)
def _try(template: str, tokens: tuple[tuple[str, str], ...], where: str) -> bool:
    user = {"role": "user", "content": QUESTION}
    both = [{"role": "system", "content": SYSTEM}, user]
    remedy = "repair it (chat_template.jinja or tokenizer_config.json), or set apply_chat_template=false."
    request = {"template": template, "conversations": [[user], both], "tokens": dict(tokens)}
    script = Path(__file__).with_name("template_trial.py")
    try:
        command, text = [sys.executable, "-I", str(script)], json.dumps(request)
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=TRIAL_S)
        alone, together = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):  # killed by its limits, or without an answer
        raise UserError(
            f"The chat template of {where} takes too much time or memory for a short question: {remedy}"
        ) from None
    if "error" in alone:
        raise UserError(f"The chat template of {where} can't be used ({alone['error']}): {remedy}")
    if QUESTION not in alone["text"]:
        raise UserError(f"The chat template of {where} leaves the user's message out: {remedy}")
    return SYSTEM in together.get("text", "")


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    where: str,
    *,
    add_generation_prompt: bool = True,
    **options: Any,
) -> str:
    """The prompt, by transformers, within `RENDER_S` and `MAX_TEXT`; `options` are the template's own."""
    try:
        conversation = [dict(message) for message in messages]
        with _stopped_after(RENDER_S):
            text = tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
    except Exception as error:  # a template can come to anything
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        reason = f"ran for {RENDER_S:g} s" if isinstance(error, RanTooLong) else f"failed ({line})"
        raise UserError(
            f"The chat template of {where} {reason} on a prompt: repair it, or set apply_chat_template=false."
        ) from None
    if len(text) > MAX_TEXT:
        raise UserError(f"The chat template of {where} made a prompt of {len(text):,} characters: repair it.")
    return text


@contextlib.contextmanager
def _stopped_after(seconds: float) -> Iterator[None]:
    """Raise `RanTooLong` in this thread when a template has used `seconds` of its CPU time.

    A tracer, since signals reach the main thread only; it looks at lines of templates and at nothing else.
    """
    end = time.thread_time() + seconds

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > end:
            raise RanTooLong
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return line if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
