#!/usr/bin/env python3
"""CPU time of the scoring pool per answer: this process and the workers, for gold and wrong answers by turns.

CPU time and not the clock, so that a busy machine can be used. Run it in two checkouts to compare them.

    python benchmarks/scoring.py chain_sum,gcd --answers 3000
"""

import argparse
import time

import psutil

from whetstone.config import load
from whetstone.tasks.mixture import build_tasks
from whetstone.tasks.scoring.pool import Scorer
from whetstone.tasks.scoring.process import ScoringRequest

NUM_PROBLEMS = 200


def worker_seconds() -> float:
    """CPU time of all processes that this one has started, and of those that they have started and ended."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(sum(one[:4]) for one in times)  # user and system, of the process and of its ended children


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", help="names, separated by commas")
    parser.add_argument("--answers", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=1, help="the best counts; later ones find warm caches")
    args = parser.parse_args()
    datasets = ", ".join(f"{name}: {{}}" for name in args.tasks.split(","))
    config = load("quickstart", [f"datasets={{{datasets}}}", "eval_num_samples=0", "reward_workers=2"]).config
    tasks = build_tasks(config, "train")
    problems = [tasks.problem(index) for index in range(min(NUM_PROBLEMS, args.answers))]
    answers = []
    for number in range(args.answers):
        problem = problems[number % len(problems)]
        gold = tasks.tasks[problem.task].gold(problem) or ""
        text = gold if number % 2 else "<answer>12</answer>"
        answers.append(ScoringRequest(problem=problem, text=text, completion_ids=(1, 2, 3), truncated=False))
    with Scorer(config) as scorer:
        scorer.submit(answers[0])
        scorer.gather()  # the workers are up
        spent = []
        for _ in range(args.repeats):
            begun = worker_seconds() + time.process_time()
            for answer in answers:
                scorer.submit(answer)
            scores = scorer.gather()
            spent.append(worker_seconds() + time.process_time() - begun)
    each = min(spent) / args.answers
    correct = sum(score.parts["correct"] for score in scores) / args.answers
    print(
        f"{args.tasks}: {1e6 * each:.0f} us of CPU time an answer, {2 / each:,.0f} answers/s on 2 cores; "
        f"correct {correct:.2f}"
    )


if __name__ == "__main__":
    main()
