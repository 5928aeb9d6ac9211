"""Seconds until a batch of episodes has answered its reset, several batches with a pause between them.

    python benchmarks/episodes.py --environment guess_number --episodes 256

The first batch finds no process that was forked before; the pause stands for the update of a step.
"""

import argparse
import os
import time

from whetstone.environments.pool import EpisodePool


def start_all(pool: EpisodePool, name: str, count: int) -> float:
    started = time.monotonic()
    for number in range(count):
        pool.start(number, name, {}, number, {})
    num_answers = 0
    while num_answers < count:
        answers = pool.poll(1.0)
        if errors := [answer.error for answer in answers if answer.error]:
            raise SystemExit(errors[0])
        num_answers += len(answers)
    seconds = time.monotonic() - started
    for number in range(count):
        pool.end(number)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--environment", default="guess_number")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--pause", type=float, default=6.0, help="seconds between batches")
    options = parser.parse_args()
    with EpisodePool([options.environment], timeout_s=60.0, memory_mb=512) as pool:
        for _ in range(options.batches):
            load = os.getloadavg()[0]
            seconds = start_all(pool, options.environment, options.episodes)
            print(f"{options.episodes} episodes in {seconds:.2f} s, load {load:.1f}")
            time.sleep(options.pause)


if __name__ == "__main__":
    main()
