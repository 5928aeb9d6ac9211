"""A reward function with TRL's signature, which also logs a metric."""

from whetstone.rewards.answers import extract_tag


def is_number(prompts, completions, answer, log_metric, **columns):
    """0.1 for an answer that is a number at all; `answer` is a column of the task."""
    texts = [extract_tag(completion[-1]["content"]) or "" for completion in completions]
    numbers = [int(text) if text.isdecimal() and len(text) < 10 else None for text in texts]
    close = [n is not None and abs(n - truth) == 1 for n, truth in zip(numbers, answer, strict=True)]
    log_metric("off_by_one_ratio", sum(close) / len(close))
    return [0.0 if number is None else 0.1 for number in numbers]
