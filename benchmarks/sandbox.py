#!/usr/bin/env python3
"""Programs a second through the warm sandbox, beside one `subprocess.run` per test: Python and C.

Both sides run the same programs on the same inputs with as many at a time as there are cores, in turns,
several rounds; the figure is the ratio of the medians. The plain side has no isolation at all; ours has
every layer that the machine allows, and the table says which. For C, the plain side is shown both ways:
compiling before every test, and compiling once per program and then one `subprocess.run` per test; ours
compiles once, by tcc where it is installed and by gcc where tcc fails or is missing.

    python benchmarks/sandbox.py [--rounds 5] [--programs 60] [--tests 3]
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
from pathlib import Path

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


def ours(pool: LocalPool, language: str, source: str, k: int, tests: int) -> None:
    """One program, all its tests, in the sandbox."""
    given = inputs(tests)
    program = Program(
        language=language, source=source.format(k=k), inputs=tuple(Input(stdin=text) for text in given)
    )
    for text, result in zip(given, pool.run(program, LIMITS).results, strict=True):
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


def rate(one: Callable[[int], None], count: int, threads: ThreadPoolExecutor, first: int) -> float:
    """Programs a second, with every core busy."""
    begun = time.perf_counter()
    list(threads.map(one, range(first, first + count)))
    return count / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--programs", type=int, default=60)
    parser.add_argument("--tests", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with LocalPool(size=cores) as pool, ThreadPoolExecutor(cores) as threads:
        sides: dict[str, Callable[[int], None]] = {
            "python, sandbox": lambda k: ours(pool, "python", PYTHON, k, given.tests),
            "python, subprocess.run per test": lambda k: plain_python(k, given.tests),
        }
        if shutil.which("gcc"):
            sides |= {
                "c, sandbox": lambda k: ours(pool, "c", C, k, given.tests),
                "c, gcc and subprocess.run per test": lambda k: plain_c(k, given.tests, compile_each=True),
                "c, gcc once, subprocess.run per test": lambda k: plain_c(k, given.tests, compile_each=False),
            }
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for one in sides.values():  # warm
            list(threads.map(one, range(cores)))
        for number in range(given.rounds):
            for name, one in sides.items():
                count = given.programs if "sandbox" in name else max(cores, given.programs // 5)
                rates[name].append(rate(one, count, threads, 1000 * (number + 1)))
        statement = pool.statement
    show(rates, statement, given, cores)


def show(rates: dict[str, list[float]], statement: str, given: argparse.Namespace, cores: int) -> None:
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"{cores} cores, {given.tests} tests a program, {given.rounds} rounds in turns. {statement}")
    print(f"C by {'tcc, then gcc' if shutil.which('tcc') else 'gcc'}.\n")
    print(f"{'':38}programs/s   ms a test   sandbox is")
    for name, value in medians.items():
        ratio = medians[f"{name.split(',')[0]}, sandbox"] / value
        times = "" if name.endswith("sandbox") else f"{ratio:9.1f} x"
        print(f"{name:38}{value:10.1f}{1000 * cores / value / given.tests:12.2f}{times}")
    if given.out:
        facts = {"machine": platform.platform(), "cores": cores, "tests": given.tests, "isolation": statement}
        text = json.dumps({**facts, "date": time.strftime("%Y-%m-%d"), "rates": rates}, indent=1)
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
