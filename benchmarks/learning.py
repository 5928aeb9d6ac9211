"""Accuracy over minutes of real runs: keeps what the figure needs of a run, and draws docs/results.png.

python benchmarks/learning.py --keep outputs/gsm8k --name Whetstone -> results/learning/Whetstone.json
python benchmarks/learning.py                                      draws every kept run
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PICTURE = ROOT / "benchmarks" / "results" / "learning", ROOT / "docs" / "results.png"


def reduce_run(folder: Path) -> dict[str, Any]:
    """Minutes and accuracy of every step and evaluation, and how the run was made."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    minutes, seconds = {0: 0.0}, 0.0
    for row in rows:
        if row["kind"] == "train":
            seconds += row["step_time"]
            minutes[row["step"]] = seconds / 60
    session = json.loads((folder / "run.json").read_text(encoding="utf-8"))["sessions"][-1]
    return {
        "session": {key: session[key] for key in ("started", "torch", "transformers", "machine")},
        "train": [[minutes[row["step"]], row["accuracy"]] for row in rows if row["kind"] == "train"],
        "eval": [
            {
                "step": row["step"],
                "minutes": minutes[row["step"]],
                **{key: row[key] for key in ("accuracy", "accuracy_low", "accuracy_high")},
                "greedy_accuracy": row.get("greedy_accuracy"),
            }
            for row in rows
            if row["kind"] == "eval"
        ],
    }


def draw(runs: dict[str, dict[str, Any]]) -> None:
    """Training batches as lines, evaluations as points with 95 % intervals; by minutes and by steps."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, constrained_layout=True)
    for axes, unit in zip(panels, ("minutes", "step"), strict=True):
        for number, (name, run) in enumerate(runs.items()):
            draw_run(axes, name, run, unit, f"C{number}")
        axes.set(xlabel=f"{unit} of training" if unit == "minutes" else "optimizer steps", ylim=(0.35, 0.95))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy")
    panels[1].legend(loc="lower right", fontsize=8)
    figure.savefig(PICTURE, dpi=110)


def draw_run(axes: Any, name: str, run: dict[str, Any], unit: str, color: str) -> None:
    steps = {"minutes": [minutes for minutes, _ in run["train"]], "step": range(1, 1 + len(run["train"]))}
    accuracy = [accuracy for _, accuracy in run["train"]]
    axes.plot(steps[unit], accuracy, color=color, alpha=0.5, linewidth=1, label=f"{name}, training batches")
    points = run["eval"]
    if not points:
        return
    below = [point["accuracy"] - point["accuracy_low"] for point in points]
    above = [point["accuracy_high"] - point["accuracy"] for point in points]
    axes.errorbar(
        [point[unit] for point in points],
        [point["accuracy"] for point in points],
        yerr=[below, above],
        fmt="o-", color=color, capsize=3, label=f"{name}, test problems",
    )  # fmt: skip
    greedy = [point for point in points if point["greedy_accuracy"] is not None]
    axes.plot(
        [point[unit] for point in greedy],
        [point["greedy_accuracy"] for point in greedy],
        "s", color=color, markerfacecolor="white", label=f"{name}, test problems, greedy",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--keep", type=Path, metavar="RUN", help="keep what the figure needs of this run folder"
    )
    parser.add_argument("--name", help="name of the kept run (default: the folder's)")
    args = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if args.keep is not None:
        kept = RESULTS / f"{args.name or args.keep.name}.json"
        kept.write_text(json.dumps(reduce_run(args.keep), indent=1) + "\n", encoding="utf-8")
    draw({path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))})


if __name__ == "__main__":
    main()
