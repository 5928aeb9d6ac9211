"""Rollouts of a scripted player: the real collector, chat template, environments and scorers, no model."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from whetstone.commands.play.session import Session, open_session
from whetstone.config import build
from whetstone.types import Rollout

Script = Callable[[int, str], str]  # number of the turn, what is new -> a turn


@contextlib.contextmanager
def playing(values: dict[str, Any]) -> Iterator[Session]:
    config = build({"eval_num_samples": 0, "reward_workers": 1, "max_completion_length": 2000, **values})
    with contextlib.ExitStack() as stack:
        session = open_session(config, stack, player="gold", raw=False, is_shown=False)
        session.player = None
        yield session


def play(session: Session, script: Script, problem: int = 0, **limits: Any) -> Rollout:
    """A rollout of one problem; `limits` change keys of environments."""
    turns = 0

    def ask(episode: int, new: str, messages: object) -> str:
        nonlocal turns
        turns += 1
        return script(turns - 1, new)

    session.engine.ask = ask
    session.engine._histories.clear()
    collector = session.collector
    assert collector is not None and collector.episodes is not None
    before = collector.episodes
    collector.episodes = replace(before, config=before.config.model_copy(update=limits))
    try:
        [group] = session._play_batch(problem, 1)
    finally:
        collector.episodes = before
    return group.rollouts[0]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
