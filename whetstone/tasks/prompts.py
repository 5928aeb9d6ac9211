"""Chat messages of a problem: the developer prompt, then the question or the row's own messages."""

from collections.abc import Sequence
from string import Formatter
from typing import Any

from whetstone.config.tasks import TasksConfig
from whetstone.errors import UserError, did_you_mean

Messages = tuple[dict[str, Any], ...]


def developer_prompt(tasks: TasksConfig) -> str | None:
    """The text of the developer prompt, which may be a name of reasoning-gym's."""
    prompt = tasks.developer_prompt
    if not prompt or not prompt.strip():
        return None
    if not prompt.strip().isidentifier():
        return prompt
    from whetstone.tasks.gym_package import SYSTEM_PROMPTS

    if prompt.strip() not in SYSTEM_PROMPTS:
        raise UserError(
            f"developer_prompt is '{prompt}', which is no prompt of "
            f"reasoning-gym{did_you_mean(prompt, SYSTEM_PROMPTS)} "
            f"Choose from {', '.join(SYSTEM_PROMPTS)}, or write the prompt itself, in more than one word."
        )
    return SYSTEM_PROMPTS[prompt.strip()]


def build_messages(prompt: str | None, role: str, question: str, row_messages: Messages) -> Messages:
    """The developer prompt (in place of the row's), then the row's messages or the question."""
    if prompt is None:
        return row_messages or ({"role": "user", "content": question},)
    turns = tuple(turn for turn in row_messages if turn["role"] not in ("system", "developer"))
    turns = turns or ({"role": "user", "content": question},)
    if role == "user":
        first = {**turns[0], "content": f"{prompt.rstrip()}\n\n{turns[0]['content']}"}
        return (first, *turns[1:])
    return ({"role": role, "content": prompt}, *turns)


def without_solution(turns: Sequence[dict[str, Any]]) -> Messages:
    """The turns before the solution of a supervised data set."""
    while turns and turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    return tuple(turns)


def check_template(template: Any, known: Sequence[str], what: str) -> list[str]:
    """The placeholders of a text, which are all known, or a complaint that names the one that is not."""
    if not isinstance(template, str):
        raise UserError(f'{what} is a {type(template).__name__}: write it in quotes, as "{{{known[0]}}}".')
    try:
        fields = [entry[1:] for entry in Formatter().parse(template) if entry[1] is not None]
    except ValueError as error:
        raise UserError(f"{what} can't be read ({error}): write a bare brace twice, {{{{ or }}}}.") from None
    names = ", ".join(f"{{{name}}}" for name in known[:30])
    for name, form, conversion in fields:
        if name not in known or form or conversion:
            raise UserError(
                f"{what} has the placeholder {{{name}}}{did_you_mean(str(name), known) or ':'} Choose from "
                f"{names}, and write a bare brace twice, {{{{ or }}}}."
            )
    return [str(name) for name, *_ in fields]
