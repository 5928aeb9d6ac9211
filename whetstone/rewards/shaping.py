"""Rewards for the manner of an answer, not its content: its format and its length. Pure functions of text
and numbers.
"""

FORMAT_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def format_reward(text: str, assistant_prefix: str = "") -> float:
    """A quarter for each of the four tags that occurs exactly once and stands after those before it.

    `assistant_prefix` is what the prompt put into the assistant's mouth ("...<think>"): it counts as written.
    """
    whole = assistant_prefix + text
    reward, reached = 0.0, -1
    for tag in FORMAT_TAGS:
        position = whole.find(tag)
        if position > reached and whole.count(tag) == 1:
            reward += 0.25
            reached = position
    return reward


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment: 0 up to max_tokens - buffer, then linearly down to -1 at
    max_tokens.
    """
    if buffer <= 0:
        return 0.0
    return max(-1.0, min(0.0, (max_tokens - buffer - num_tokens) / buffer))
