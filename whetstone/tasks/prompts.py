"""A question -> the messages a model is given: the developer prompt, by reasoning-gym's name or as text,
and the question.
"""

from whetstone.config import nearest
from whetstone.config.rooms import TasksRoom
from whetstone.errors import UserError


def developer_prompt(tasks: TasksRoom) -> str | None:
    """The text of the developer prompt: a name of reasoning-gym's is looked up, anything else is a text
    already.
    """
    prompt = tasks.developer_prompt
    if not prompt or not prompt.strip():
        return None
    if not prompt.strip().isidentifier():
        return prompt
    from reasoning_gym.utils import SYSTEM_PROMPTS

    if prompt.strip() not in SYSTEM_PROMPTS:
        raise UserError(
            f"developer_prompt is '{prompt}', which is no prompt of "
            f"reasoning-gym{nearest(prompt, SYSTEM_PROMPTS)} "
            f"Choose from {', '.join(SYSTEM_PROMPTS)}, or write the prompt itself, in more than one word."
        )
    return SYSTEM_PROMPTS[prompt.strip()]


def build_messages(prompt: str | None, role: str, question: str) -> tuple[dict[str, str], ...]:
    """The developer prompt under its role, then the question; the role `user` makes it one message."""
    if prompt is None:
        return ({"role": "user", "content": question},)
    if role == "user":
        return ({"role": "user", "content": f"{prompt.rstrip()}\n\n{question}"},)
    return ({"role": role, "content": prompt}, {"role": "user", "content": question})
