"""Reward functions as a user would write them, for the tests: plain, async, hanging and dying ones."""

import asyncio
import os
import time


def contents(completions):
    return [c if isinstance(c, str) else c[-1]["content"] for c in completions]


def length_of_text(completions, **kwargs):
    return [float(len(text)) for text in contents(completions)]


async def slow_but_async(prompts, completions, completion_ids, answer, **kwargs):
    async def one(text, truth, ids):
        await asyncio.sleep(0.05)
        return 0.5 if f"<answer>{truth}</answer>" in text else -0.01 * len(ids)

    return await asyncio.gather(
        *(one(*row) for row in zip(contents(completions), answer, completion_ids, strict=True))
    )


def only_countdown(completions, task, target, **kwargs):
    return [float(t) if name == "countdown" else None for name, t in zip(task, target, strict=True)]


def logs(completions, log_metric, log_extra, trainer_state):
    log_metric("texts", len(completions))
    log_extra("first_letter", [text[:1] for text in contents(completions)])
    assert trainer_state is None
    return [0.0] * len(completions)


def sometimes_bad(completions, **kwargs):
    for text in contents(completions):
        if "hang" in text:
            time.sleep(60)
        if "die" in text:
            os._exit(3)
        if "raise" in text:
            raise KeyError("no such thing")
    return [1.0] * len(completions)


def too_few(completions, **kwargs):
    return [1.0]


def no_numbers(completions, **kwargs):
    return "1" * len(completions)


def not_finite(completions, **kwargs):
    return [float("nan")] * len(completions)


not_a_function = 3


def forks(completions, **kwargs):
    os.fork()
    return [1.0] * len(completions)


def writes_to_every_descriptor(completions, **kwargs):
    if "write" in contents(completions)[0]:
        for descriptor in range(3, 1024):
            try:
                os.write(descriptor, b"\x05\x00\x00\x00hello, this is no message")
            except OSError:
                continue
    return [1.0] * len(completions)


def exits(completions, **kwargs):
    raise SystemExit(0)


def nothing(completions, **kwargs):
    return [None] * len(completions)


def one_value(completions, **kwargs):
    return 1.0


def some_unusable(completions, **kwargs):
    values = {
        "nan": float("nan"),
        "huge": 1e300,
        "text": "much",
        "list": [1.0],
        "fine": 0.5,
        "number": "0.25",
    }
    return [values[text] for text in contents(completions)]


def logs_surrogates(completions, log_extra, **kwargs):
    log_extra("odd", ["\ud800" for _ in completions])
    return [1.0] * len(completions)
