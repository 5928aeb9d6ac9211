"""Times TRL's own steps from inside its training loop, and the methods that a step consists of.

A step is from `on_step_begin` to `on_step_end`: sampling, scoring, forward, backward and the optimizer are in
it, logging is not. Changes nothing of what TRL does.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from quiet import Others
from transformers import TrainerCallback


class StepClock(TrainerCallback):
    """Seconds of every step, and of every method that was given to `watch`, step by step."""

    def __init__(self, wait: Callable[[], None], on_begin: Callable[[], None] = lambda: None):
        self._wait = wait  # for the device
        self._on_begin = on_begin
        self.seconds: list[float] = []
        self.others: list[float | None] = []  # how busy others were meanwhile
        self._others = Others()
        self.spent: list[dict[str, float]] = []
        self._running: dict[str, float] = defaultdict(float)
        self._begun = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._on_begin()
        self._wait()
        self._running = defaultdict(float)
        self._others.begin()
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._wait()
        self.seconds.append(time.perf_counter() - self._begun)
        self.others.append(self._others.share())
        self.spent.append(dict(self._running))
        print(f"step {len(self.seconds)}: {self.seconds[-1]:.2f} s {self.spent[-1] or ''}", flush=True)

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Add the seconds of `owner.method` up under `name`."""
        real = getattr(owner, method)

        @functools.wraps(real)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._wait()
            begun = time.perf_counter()
            try:
                return real(*args, **kwargs)
            finally:
                self._wait()
                self._running[name] += time.perf_counter() - begun

        setattr(owner, method, timed)
