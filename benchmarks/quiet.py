"""Other people's work on the same cores: waited for before a step, and measured during it.

Two threads that wait for each other at every small product are several times slower beside one busy process,
so a CPU's figure without this means little. Reads /proc/stat; where there is none (not Linux), it knows
nothing and waits for nothing.
"""

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def busy_s() -> float | None:
    """Processor seconds that all processes have had since the machine started."""
    if not STAT.is_file():
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, STAT.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) * TICK_S


class Others:
    """How busy others kept the cores between `begin` and `share`."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._begun, self._busy, self._own = time.monotonic(), busy_s(), time.process_time()

    def share(self) -> float | None:
        """Of one core's time; workers of our own count as others, they do next to nothing."""
        now = busy_s()
        if now is None or self._busy is None:
            return None
        own = time.process_time() - self._own
        return max(0.0, now - self._busy - own) / (time.monotonic() - self._begun)


def wait_for_quiet(limit_s: float = 300.0, share: float = 0.1, window_s: float = 2.0) -> bool:
    """Return when others have left the cores alone for a moment; False where they did not."""
    until = time.monotonic() + limit_s
    while True:
        others = Others()
        time.sleep(window_s)
        found = others.share()
        if found is None or found < share:
            return True
        if time.monotonic() > until:
            return False
