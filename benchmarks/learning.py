"""Accuracy over minutes of real runs: keeps what the figure needs of a run, and draws docs/results.png.

python benchmarks/learning.py --keep outputs/gsm8k --name gsm8k     -> benchmarks/results/learning/gsm8k.json
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
    """Training accuracy as a line, evaluations with their 95 % intervals as points."""
    figure, axes = plt.subplots(figsize=(7, 3.6), constrained_layout=True)
    for number, (name, run) in enumerate(runs.items()):
        color = f"C{number}"
        axes.plot(*zip(*run["train"], strict=True), color=color, alpha=0.35, linewidth=1)
        points = run["eval"]
        below = [point["accuracy"] - point["accuracy_low"] for point in points]
        above = [point["accuracy_high"] - point["accuracy"] for point in points]
        axes.errorbar(
            [point["minutes"] for point in points],
            [point["accuracy"] for point in points],
            yerr=[below, above],
            fmt="o-", color=color, capsize=3, label=f"{name}, temperature 1",
        )  # fmt: skip
        greedy = [point for point in points if point["greedy_accuracy"] is not None]
        axes.plot(
            [point["minutes"] for point in greedy],
            [point["greedy_accuracy"] for point in greedy],
            "s", color=color, markerfacecolor="white", label=f"{name}, greedy",
        )  # fmt: skip
    axes.set(xlabel="minutes of training", ylabel="accuracy", ylim=(0.35, 0.85))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(PICTURE, dpi=110)


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
