"""The tables of docs/results.md, from the kept runs of results/learning.

python benchmarks/results_page.py      fills the page
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import learning
from contest import into_docs

PAGE = learning.ROOT / "docs" / "results.md"
COLUMNS = ("recipe", "steps", "minutes", "sampled, before", "after", "greedy, before", "after")


@dataclass(frozen=True)
class Row:
    """A run, or one run for each seed: `runs` of results/learning/FIGURE."""

    recipe: str
    page: str  # of docs/recipes
    figure: str
    runs: tuple[str, ...]


def _row(recipe: str, page: str, figure: str, *runs: str) -> Row:
    return Row(recipe, page, figure, runs)


def _seeds(pattern: str) -> list[str]:
    return [pattern.format(seed) for seed in (42, 43, 44)]


SECTIONS = {
    "results_math": (
        _row("gsm8k, 3 seeds", "gsm8k", "gsm8k", *_seeds("Whetstone, 60 steps, seed {}")),
        _row("gsm8k, 512 tokens", "gsm8k", "gsm8k_settings", "64 prompts x 16 completions"),
        _row("math after SFT, LoRA, 2 completions", "math", "math", "math"),
        _row("math after SFT, LoRA, 8 completions", "math", "math", "8 completions"),
    ),
    "results_reasoning": (
        _row("six_tasks, 3 seeds", "six_tasks", "six_tasks",
             "Whetstone", "Whetstone, seed 43", "Whetstone, seed 44"),
        _row("six_tasks, critic", "algorithms", "algorithms", "critic"),
        _row("six_tasks, dapo", "algorithms", "dapo", "dapo"),
        _row("six_tasks, local_kl", "algorithms", "dapo", "local_kl"),
        _row("grpo", "reasoning_gym", "grpo", "grpo"),
        _row("syllogism_toy, temperature 0.6", "reasoning_gym", "syllogism", "syllogism_toy"),
        _row("multi_tasks", "reasoning_gym", "multi_tasks", "multi_tasks"),
        _row("multi_tasks_1h, 50 of 600 steps", "reasoning_gym", "multi_tasks", "multi_tasks_1h"),
        _row("countdown, chat template", "countdown", "countdown", "chat template"),
        _row("countdown, base template", "countdown", "countdown", "base template"),
    ),
    "results_turns": (
        _row("guess_gpu, 3 seeds", "guess", "guess", *_seeds("seed {}")),
        _row("countdown_python, 3 seeds", "countdown", "countdown_python", *_seeds("Python tool, seed {}")),
        _row("the same without the tool, 3 seeds", "countdown", "countdown_python",
             *_seeds("no tool, seed {}")),
    ),
    "results_programs": (
        _row("klong, RL alone", "programs", "klong", "RL alone"),
        _row("klong, SFT", "programs", "klong", "SFT"),
        _row("klong, RL after SFT", "programs", "klong", "RL after SFT"),
        _row("programs, 20 problems in Python", "programs", "problems", "Python"),
        _row("the same problems in Klong", "programs", "problems", "Klong"),
        _row("q/1.5b with Klong, RL after SFT", "programs", "q", "RL after SFT"),
    ),
    "results_sft": (
        _row("RL alone", "gsm8k", "gsm8k_sft", "RL alone"),
        _row("SFT on 1,000 solutions", "gsm8k", "gsm8k_sft", "SFT"),
        _row("RL after SFT", "gsm8k", "gsm8k_sft", "RL after SFT"),
        _row("STaR on 1,000 problems", "gsm8k", "gsm8k_sft", "STaR"),
        _row("RL after STaR", "gsm8k", "gsm8k_sft", "RL after STaR"),
    ),
}  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        kept = learning.kept_runs(learning.RESULTS / row.figure)
        lines.append(f"| {' | '.join(cells(row, [kept[name] for name in row.runs]))} |")
    return "\n".join(lines)


def cells(row: Row, runs: Sequence[dict[str, Any]]) -> list[str]:
    ends = [(run["eval"][0], run["eval"][-1]) for run in runs]
    values = [
        accuracy([points[end] for points in ends], name)
        for name in ("accuracy", "greedy_accuracy")
        for end in (0, 1)
    ]
    steps = {run["train"][-1][0] for run in runs}
    assert len(steps) == 1, row
    minutes = f"{mean(run['train'][-1][1] for run in runs):.1f}"
    at_a_time = max(run.get("parallel", 1) for run in runs)
    if at_a_time > 1:
        minutes += f" ({at_a_time} at a time)"
    return [f"[{row.recipe}](recipes/{row.page}.md)", str(steps.pop()), minutes, *values]


def accuracy(points: Sequence[dict[str, Any]], name: str) -> str:
    """Of one run with its interval, where it was kept; of several seeds mean, lowest and highest."""
    means = [100 * point[name] for point in points]
    if len(means) > 1:
        spread = f" ({min(means):.1f} to {max(means):.1f})" if min(means) < max(means) else ""
        return f"{mean(means):.1f} %{spread}"
    low, high = (points[0].get(f"{name}_{end}") for end in ("low", "high"))
    return f"{means[0]:.1f} %" + (
        "" if low is None or high is None else f" [{100 * low:.1f}, {100 * high:.1f}]"
    )


def main() -> None:
    for name, rows in SECTIONS.items():
        into_docs(name, table(rows), PAGE)


if __name__ == "__main__":
    main()
