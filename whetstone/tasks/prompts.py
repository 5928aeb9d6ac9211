"""Chat messages of a problem: the developer prompt, then the question or the row's own messages."""

from collections.abc import Sequence
from string import Formatter
from typing import Any

from whetstone.config.tasks import TasksConfig
from whetstone.errors import UserError, did_you_mean

Messages = tuple[dict[str, str], ...]


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


def conversation(value: Any) -> Messages:
    """A column's chat messages, up to the last that the model is to answer; empty where it holds others."""
    if not isinstance(value, list) or not value:
        return ()
    if any(not isinstance(turn, dict) or not isinstance(turn.get("content"), str) for turn in value):
        return ()
    turns = [{"role": str(turn.get("role", "user")), "content": turn["content"]} for turn in value]
    return without_solution(turns)


def without_solution(turns: list[dict[str, str]]) -> Messages:
    """The turns before the solution of a supervised data set."""
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    return tuple(turns)


def check_template(template: Any, known: Sequence[str], what: str) -> None:
    """A text whose placeholders are all known, or a complaint that names the one that is not."""
    if not isinstance(template, str):
        raise UserError(f"{what} is a {type(template).__name__}: give a text, such as '{{{known[0]}}}'.")
    try:
        fields = [entry[1:] for entry in Formatter().parse(template) if entry[1] is not None]
    except ValueError as error:
        raise UserError(f"{what} can't be read ({error}): write a bare brace twice, {{{{ or }}}}.") from None
    names = ", ".join(f"{{{name}}}" for name in known)
    for name, form, conversion in fields:
        if name not in known or form or conversion:
            raise UserError(
                f"{what} has the placeholder {{{name}}}: choose from {names}, and write a bare brace twice, "
                "{{ or }}."
            )
