"""`make fuzz`: random valid configurations, trained for real, and held against invariants.

python -m tests.fuzz --runs 300 --jobs 2       python -m tests.fuzz --only 17
"""

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=300, help="how many configurations (default: 300)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--only", type=int, help="this seed alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes, before they import torch
    from tests.fuzz.draw import write_files
    from tests.fuzz.trial import describe, run_seed

    folder = tempfile.mkdtemp(prefix="fuzz-")
    write_files(Path(folder) / "files")
    seeds = [args.only] if args.only is not None else list(range(args.first, args.first + args.runs))
    checks: Counter[str] = Counter()
    sentences: Counter[str] = Counter()
    num_broken = num_refused = 0
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=40) as pool:
        for number, result in enumerate(pool.imap_unordered(run_seed, [(s, folder) for s in seeds]), 1):
            checks += result.checks
            num_refused += result.sentence is not None
            if result.sentence:
                sentences[result.sentence[:110]] += 1
            if result.violations:
                num_broken += 1
                print(describe(result), flush=True)
            if number % 10 == 0 or number == len(seeds):
                rate = (time.monotonic() - started) / number
                print(f"{number} of {len(seeds)} runs, {num_broken} broken, {rate:.1f} s each", flush=True)
    print("looked at:", ", ".join(f"{name} {count}" for name, count in sorted(checks.items())))
    print(f"{num_refused} ended in a sentence:")
    for text, count in sentences.most_common():
        print(f"  {count} x {text}")
    print(f"{len(seeds) - num_broken} passed, {num_broken} failed")
    if not num_broken:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if num_broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
