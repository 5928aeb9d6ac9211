"""The reward of benchmarks/step.py, the same for everyone: cheap, real, and different between completions."""


def digit_share(completions: list, **_: object) -> list[float | None]:
    """The share of sevens in a text, whichever form a trainer hands it over in."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [text.count("7") / max(1, len(text)) for text in texts]
