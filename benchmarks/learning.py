"""Accuracy over minutes of real runs: keeps what a figure needs of a run, and draws docs/recipes/RECIPE.png.

python benchmarks/learning.py --keep outputs/gsm8k --recipe gsm8k --name Whetstone
                                       keeps the run in results/learning/gsm8k/Whetstone.json
python benchmarks/learning.py          draws the kept runs of every recipe
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
RESULTS, PICTURES = ROOT / "benchmarks" / "results" / "learning", ROOT / "docs" / "recipes"


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
        "train": [
            [row["step"], minutes[row["step"]], row["accuracy"]] for row in rows if row["kind"] == "train"
        ],
        "eval": [
            {
                "step": row["step"],
                "minutes": minutes[row["step"]],
                **{key: row[key] for key in ("accuracy", "accuracy_low", "accuracy_high")},
                "greedy_accuracy": row.get("greedy_accuracy"),
            }
            for row in rows
            if row["kind"] == "eval"
        ]
        + [evaluated_later(file, minutes) for file in folder.glob("evaluations/*/eval_results/*.json")],
    }


def evaluated_later(file: Path, minutes: dict[int, float]) -> dict[str, Any]:
    """What `whet eval` wrote for a checkpoint of the run."""
    result = json.loads(file.read_text(encoding="utf-8"))["summary"]
    accuracy, greedy = result["accuracy"], result["greedy_accuracy"]
    return {
        "step": result["step"],
        "minutes": minutes[result["step"]],
        "accuracy": accuracy["mean"],
        "accuracy_low": accuracy["low"],
        "accuracy_high": accuracy["high"],
        "greedy_accuracy": None if greedy is None else greedy["mean"],
    }


def draw(picture: Path, runs: dict[str, dict[str, Any]]) -> None:
    """By minutes and by steps: training batches as thin lines, evaluations as circles with 95 % intervals,
    greedy ones as squares."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, constrained_layout=True)
    for axes, unit in zip(panels, ("minutes", "step"), strict=True):
        for number, (name, run) in enumerate(runs.items()):
            draw_run(axes, name, run, unit, f"C{number}")
        axes.set(xlabel=f"{unit} of training" if unit == "minutes" else "optimizer steps")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy")
    for marker, text in (("o-", "test problems, sampled, 95 % intervals"), ("s", "test problems, greedy")):
        panels[1].plot(
            [], [], marker, color="gray", markerfacecolor="white" if marker == "s" else None, label=text
        )
    panels[1].plot([], [], color="gray", alpha=0.5, linewidth=1, label="training batches")
    panels[1].legend(loc="lower right", fontsize=8)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def draw_run(axes: Any, name: str, run: dict[str, Any], unit: str, color: str) -> None:
    steps, minutes, accuracy = zip(*run["train"], strict=True)
    axes.plot(steps if unit == "step" else minutes, accuracy, color=color, alpha=0.4, linewidth=1)
    axes.plot([], [], color=color, linewidth=4, label=name)
    points = run["eval"]
    if not points:
        return
    below = [point["accuracy"] - point["accuracy_low"] for point in points]
    above = [point["accuracy_high"] - point["accuracy"] for point in points]
    axes.errorbar(
        [point[unit] for point in points],
        [point["accuracy"] for point in points],
        yerr=[below, above],
        fmt="o-", color=color, capsize=3,
    )  # fmt: skip
    greedy = [point for point in points if point["greedy_accuracy"] is not None]
    axes.plot(
        [point[unit] for point in greedy],
        [point["greedy_accuracy"] for point in greedy],
        "s", color=color, markerfacecolor="white",
    )  # fmt: skip


def kept_runs(folder: Path) -> list[Path]:
    """Whetstone's first."""
    return sorted(folder.glob("*.json"), key=lambda path: (not path.stem.startswith("Whetstone"), path.stem))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--keep", type=Path, metavar="RUN", help="keep what the figure needs of this run folder"
    )
    parser.add_argument("--recipe", help="the run's figure (default: its folder's name)")
    parser.add_argument("--name", default="Whetstone", help="name of the kept run in the figure")
    args = parser.parse_args()
    if args.keep is not None:
        kept = RESULTS / (args.recipe or args.keep.name) / f"{args.name}.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(reduce_run(args.keep), indent=1) + "\n", encoding="utf-8")
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        runs = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in kept_runs(folder)}
        draw(PICTURES / f"{folder.name}.png", runs)


if __name__ == "__main__":
    main()
