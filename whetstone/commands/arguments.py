"""Arguments of commands: a configuration, `key=value` settings, flags."""

from whetstone.errors import UserError

DEFAULT_RECIPE = "quickstart"


def split_words(words: list[str]) -> tuple[str | None, list[str]]:
    """The configuration, if the first word is one or `--config FILE` names it, and the rest: `key=value` and
    flags.
    """
    words, named = take_text(words, "--config", "--config config/grpo.yaml")
    if named is not None:
        return named, words
    if words and "=" not in words[0] and not words[0].startswith("-"):
        return words[0], words[1:]
    return None, words


def take_number(words: list[str], flag: str, default: int) -> tuple[list[str], int]:
    """`--flag N` or `--flag=N` taken out of `words`."""
    words = [
        part for word in words for part in (word.split("=", 1) if word.startswith(f"{flag}=") else [word])
    ]
    if flag not in words:
        return words, default
    place = words.index(flag)
    text = words[place + 1] if place + 1 < len(words) else ""
    if not text.isdecimal():
        raise UserError(f"{flag} takes a number, such as {flag} {default}.")
    return words[:place] + words[place + 2 :], int(text)


def take_text(
    words: list[str], flag: str, example: str = "--answer 'The answer is \\boxed{42}'"
) -> tuple[list[str], str | None]:
    """`--flag TEXT` or `--flag=TEXT` taken out of `words`; None where it is not there."""
    for place, word in enumerate(words):
        if word.startswith(f"{flag}="):
            return words[:place] + words[place + 1 :], word.split("=", 1)[1]
        if word == flag:
            if place + 1 == len(words):
                raise UserError(f"{flag} takes a text, such as {example}.")
            return words[:place] + words[place + 2 :], words[place + 1]
    return words, None
