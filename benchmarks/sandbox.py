#!/usr/bin/env python3
"""Programs a second through the warm sandbox, beside one `subprocess.run` per test: Python and C.

Both sides run the same programs on the same inputs with as many at a time as there are cores, in turns,
several rounds; the figure is the ratio of the medians. Beside it stands the processor time of all processes
together, which depends less on what else the machine is doing. On a shared machine `--others 0.05` waits for
idle cores, and measures a round again during which others took more than that share.

The plain side has no isolation at all; ours has every layer that the machine allows, and the table says
which. For C, the plain side is shown both ways: compiling before every test, and compiling once per program
and then one `subprocess.run` per test; ours compiles once, by tcc where it is installed and by gcc where tcc
fails or is missing.

    python benchmarks/sandbox.py [--rounds 5] [--programs 60] [--tests 3] [--others 0.05]
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from whetstone.sandbox.pool import LocalPool
from whetstone.sandbox.program import Input, Limits, Program

PYTHON = "n = int(input())\ntotal = {k}\nfor i in range(n):\n    total += i * i\nprint(total)\n"
C = """#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(void) {{
    long n, total = {k};
    if (scanf("%ld", &n) != 1) return 1;
    for (long i = 0; i < n; i++) total += i * i;
    printf("%ld\\n", total);
    return 0;
}}
"""
LIMITS = Limits()


def inputs(tests: int) -> list[str]:
    return [f"{10 + number}\n" for number in range(tests)]


def expected(k: int, given: str) -> str:
    return f"{k + sum(i * i for i in range(int(given)))}\n"


def ours(pools: SimpleQueue[LocalPool], language: str, source: str, k: int, tests: int) -> None:
    """One program, all its tests, in the sandbox."""
    given = inputs(tests)
    program = Program(
        language=language, source=source.format(k=k), inputs=tuple(Input(stdin=text) for text in given)
    )
    pool = pools.get()
    results = pool.run(program, LIMITS).results
    pools.put(pool)
    for text, result in zip(given, results, strict=True):
        assert result.stdout == expected(k, text), result


def plain_python(k: int, tests: int) -> None:
    for text in inputs(tests):
        done = subprocess.run(
            [sys.executable, "-c", PYTHON.format(k=k)], input=text, capture_output=True, text=True, timeout=10
        )
        assert done.stdout == expected(k, text), done


def plain_c(k: int, tests: int, *, compile_each: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "main.c"), Path(folder, "main")
        source.write_text(C.format(k=k))
        for number, text in enumerate(inputs(tests)):
            if number == 0 or compile_each:
                subprocess.run(
                    ["gcc", "-O2", "-w", "-o", binary, source], check=True, capture_output=True, timeout=30
                )
            done = subprocess.run([binary], input=text, capture_output=True, text=True, timeout=10)
            assert done.stdout == expected(k, text), done


def processor_s() -> float:
    """Processor time of this process and all beneath it, those that have ended included."""
    stats: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stats[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
    found, waiting = 0, [os.getpid()]
    while waiting:
        process = waiting.pop()
        found += sum(int(ticks) for ticks in stats[process][11:15])
        waiting += [below for below, fields in stats.items() if int(fields[1]) == process]
    return found / os.sysconf("SC_CLK_TCK")


class Others:
    """What share of the cores other processes take."""

    def __init__(self) -> None:
        self._begun = self._now()

    def _now(self) -> tuple[float, float]:
        """Processor time of the whole machine less ours, and the clock."""
        fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
        busy = sum(int(field) for number, field in enumerate(fields[:8]) if number not in (3, 4))
        return busy / os.sysconf("SC_CLK_TCK") - processor_s(), time.perf_counter()

    def share(self) -> float:
        spent, now = self._now()
        return max(0.0, spent - self._begun[0]) / (now - self._begun[1]) / (os.cpu_count() or 1)


def wait_for_idle_cores(most: float) -> None:
    while True:
        others = Others()
        time.sleep(1)
        if others.share() <= most:
            return


def speed(
    one: Callable[[int], None], count: int, threads: ThreadPoolExecutor, first: int
) -> tuple[float, float]:
    """Programs a second with every core busy, and milliseconds of processor time a program."""
    spent, begun = processor_s(), time.perf_counter()
    list(threads.map(one, range(first, first + count)))
    seconds = time.perf_counter() - begun
    return count / seconds, 1000 * (processor_s() - spent) / count


def one_round(
    sides: dict[str, Callable[[int], None]],
    given: argparse.Namespace,
    threads: ThreadPoolExecutor,
    number: int,
) -> tuple[float, dict[str, tuple[float, float]]]:
    """What others took meanwhile, and the speed of every side."""
    wait_for_idle_cores(given.others)
    others, seen = Others(), {}
    for name, one in sides.items():
        count = given.programs if "sandbox" in name else max(2, given.programs // 5)
        seen[name] = speed(one, count, threads, 1000 * number)
    return others.share(), seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--programs", type=int, default=60)
    parser.add_argument("--tests", type=int, default=3)
    parser.add_argument("--others", type=float, default=1.0, help="largest share of the cores in a round")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    pools: SimpleQueue[LocalPool] = SimpleQueue()
    with ExitStack() as stack, ThreadPoolExecutor(cores) as threads:
        for _ in range(cores):
            pools.put(stack.enter_context(LocalPool()))
        sides: dict[str, Callable[[int], None]] = {
            "python, sandbox": lambda k: ours(pools, "python", PYTHON, k, given.tests),
            "python, subprocess.run per test": lambda k: plain_python(k, given.tests),
        }
        if shutil.which("gcc"):
            sides |= {
                "c, sandbox": lambda k: ours(pools, "c", C, k, given.tests),
                "c, gcc and subprocess.run per test": lambda k: plain_c(k, given.tests, compile_each=True),
                "c, gcc once, subprocess.run per test": lambda k: plain_c(k, given.tests, compile_each=False),
            }
        rates: dict[str, list[float]] = {name: [] for name in sides}
        processor: dict[str, list[float]] = {name: [] for name in sides}
        for one in sides.values():  # warm
            list(threads.map(one, range(cores)))
        number, shares = 0, []
        while len(shares) < given.rounds:
            number += 1
            share, seen = one_round(sides, given, threads, number)
            if share <= given.others:
                shares.append(share)
                for name, (rate, cost) in seen.items():
                    rates[name].append(rate)
                    processor[name].append(cost)
        statement = pools.get().statement
    facts = {"machine": platform.platform(), "cores": cores, "tests": given.tests, "isolation": statement}
    facts |= {"share_of_others": shares, "rounds_measured_again": number - len(shares)}
    show(rates, processor, facts)
    if given.out:
        facts |= {"date": time.strftime("%Y-%m-%d"), "rates": rates, "processor_ms_a_program": processor}
        given.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def show(rates: dict[str, list[float]], processor: dict[str, list[float]], facts: dict[str, Any]) -> None:
    medians = {name: statistics.median(values) for name, values in rates.items()}
    costs = {name: statistics.median(values) for name, values in processor.items()}
    rounds = len(next(iter(rates.values())))
    print(
        f"{facts['cores']} cores, {facts['tests']} tests a program, {rounds} rounds in turns. "
        f"{facts['isolation']}"
    )
    print(
        f"Others took {max(facts['share_of_others']):.0%} of the cores at most; "
        f"{facts['rounds_measured_again']} rounds were measured again."
    )
    print(f"C by {'tcc, then gcc' if shutil.which('tcc') else 'gcc'}.\n")
    print(f"{'':38}programs/s   sandbox is   processor ms a test   sandbox is")
    for name, value in medians.items():
        own = f"{name.split(',')[0]}, sandbox"
        is_own = name == own
        faster = "" if is_own else f"{medians[own] / value:.1f} x"
        cheaper = "" if is_own else f"{costs[name] / costs[own]:.1f} x"
        print(f"{name:38}{value:10.1f}{faster:>13}{costs[name] / facts['tests']:22.2f}{cheaper:>13}")


if __name__ == "__main__":
    main()
