"""Rewards for the manner of an answer, not its content: its format and its length. Pure functions of text
and numbers.
"""

import unicodedata

FORMAT_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_BLANK_LETTERS = "\u115f\u1160\u2800\u3164\uffa0"  # drawn as nothing, though Unicode calls them letters
_INVISIBLE = ("Cc", "Cf", "Cn", "Cs", "Mn", "Zl", "Zp", "Zs")  # controls, zero width, accents alone, spaces


def format_reward(text: str, assistant_prefix: str = "") -> float:
    """A quarter for each of the four tags that occurs exactly once and stands after those before it.

    A pair of tags with nothing visible between them earns nothing.
    `assistant_prefix` is what the prompt put into the assistant's mouth ("...<think>"): it counts as written.
    """
    full_text = assistant_prefix + text
    positions: dict[str, int] = {}
    last_position = -1
    for tag in FORMAT_TAGS:
        position = full_text.find(tag)
        if position > last_position and full_text.count(tag) == 1:
            positions[tag] = last_position = position
    for opening, closing in (FORMAT_TAGS[:2], FORMAT_TAGS[2:]):
        start, end = full_text.find(opening), full_text.find(closing)
        if 0 <= start < end and not has_content(full_text[start + len(opening) : end]):
            positions.pop(opening, None)
            positions.pop(closing, None)
    return 0.25 * len(positions)


def has_content(text: str) -> bool:
    """Whether anything in a text can be seen."""
    return any(unicodedata.category(sign) not in _INVISIBLE and sign not in _BLANK_LETTERS for sign in text)


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment: 0 up to max_tokens - buffer, then linearly down to -1 at
    max_tokens.
    """
    if buffer <= 0:
        return 0.0
    return max(-1.0, min(0.0, (max_tokens - buffer - num_tokens) / buffer))
