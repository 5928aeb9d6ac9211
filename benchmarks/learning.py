"""Accuracy over minutes of real runs: keeps what a figure needs of a run, and draws docs/recipes/RECIPE.png.

python benchmarks/learning.py --keep outputs/gsm8k --recipe gsm8k --name Whetstone
                                       keeps the run in results/learning/gsm8k/Whetstone.json
python benchmarks/learning.py          draws the kept runs of every recipe
"""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PICTURES = ROOT / "benchmarks" / "results" / "learning", ROOT / "docs" / "recipes"


def reduce_run(folder: Path) -> dict[str, Any]:
    """Minutes and accuracy of every step and evaluation, how fast the run was, and how it was made."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    train = [row for row in rows if row["kind"] == "train"]
    minutes, seconds = {0: 0.0}, 0.0
    for row in train:
        seconds += row["step_time"]
        minutes[row["step"]] = seconds / 60
    session = json.loads((folder / "run.json").read_text(encoding="utf-8"))["sessions"][-1]
    files = [*folder.glob("eval_results/eval_step_*.json"), *folder.glob("evaluations/*/eval_results/*.json")]
    points = [reduce_evaluation(file, minutes) for file in files]
    return {
        "session": {key: session[key] for key in ("started", "torch", "transformers", "machine")},
        "speed": reduce_speed(train),
        "train": [[row["step"], minutes[row["step"]], row.get("accuracy")] for row in train],
        "eval": sorted(points, key=lambda point: point["step"]),
    }


def reduce_evaluation(file: Path, minutes: dict[int, float]) -> dict[str, Any]:
    """An evaluation of the run, or of one of its checkpoints by `whet eval`."""
    result = json.loads(file.read_text(encoding="utf-8"))["summary"]
    point: dict[str, Any] = {"step": result["step"], "minutes": minutes[result["step"]]}
    for name in ("accuracy", "greedy_accuracy"):
        value = result[name] or {"mean": None, "low": None, "high": None}
        point |= {name: value["mean"], f"{name}_low": value["low"], f"{name}_high": value["high"]}
    if result["samples_per_problem"] > 1:
        point["pass_at_k"] = result["pass_at_k"]
    tasks = {task: entry["accuracy"]["mean"] for task, entry in result["per_task"].items()}
    return point | {
        "temperature": result["temperature"],
        "mean_length": result["mean_length"],
        "tasks": tasks if len(tasks) > 1 else {},
    }


def reduce_speed(train: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the steps, the first one left out: it compiles."""
    steady = train[1:] or train
    names = ("step_time", "rollout_tokens_per_s", "update_tokens_per_s", "mfu", "completions/mean_length")
    values = {name: [row[name] for row in steady if row.get(name) is not None] for name in names}
    return {name: median(found) for name, found in values.items() if found}


def draw(picture: Path, runs: dict[str, dict[str, Any]]) -> None:
    """By minutes and by steps: training batches as thin lines, evaluations as circles with 95 % intervals,
    greedy ones as squares."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True, constrained_layout=True)
    for axes, unit in zip(panels, ("minutes", "step"), strict=True):
        for number, (name, run) in enumerate(runs.items()):
            draw_run(axes, name, run, unit, f"C{number}")
        axes.set(xlabel=f"{unit} of training" if unit == "minutes" else "optimizer steps")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy")
    for marker, text in (("o-", "test problems, sampled, 95 % intervals"), ("s", "test problems, greedy")):
        panels[1].plot(
            [], [], marker, color="gray", markerfacecolor="white" if marker == "s" else None, label=text
        )
    panels[1].plot([], [], color="gray", alpha=0.5, linewidth=1, label="training batches")
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def draw_run(axes: Any, name: str, run: dict[str, Any], unit: str, color: str) -> None:
    train = [row for row in run["train"] if row[2] is not None]  # supervised steps have no accuracy
    position = 0 if unit == "step" else 1
    axes.plot(
        [row[position] for row in train], [row[2] for row in train], color=color, alpha=0.4, linewidth=1
    )
    axes.plot([], [], color=color, linewidth=4, label=name)
    points = [point for point in run["eval"] if point["accuracy"] is not None]
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


def keep(figure: str, name: str, run: dict[str, Any]) -> None:
    kept = RESULTS / figure / f"{name}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def kept_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """The runs of a figure by name, Whetstone's first."""
    paths = sorted(folder.glob("*.json"), key=lambda path: (not path.stem.startswith("Whetstone"), path.stem))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def draw_all() -> None:
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        draw(PICTURES / f"{folder.name}.png", kept_runs(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--keep", type=Path, metavar="RUN", help="keep what the figure needs of this run folder"
    )
    parser.add_argument("--recipe", help="the run's figure (default: its folder's name)")
    parser.add_argument("--name", default="Whetstone", help="name of the kept run in the figure")
    parser.add_argument(
        "--before",
        metavar="NAME",
        help="a kept run of that figure from the same model: its evaluation at step 0 is this run's as well",
    )
    args = parser.parse_args()
    if args.keep is not None:
        figure, run = args.recipe or args.keep.name, reduce_run(args.keep)
        if args.before is not None:
            first = kept_runs(RESULTS / figure)[args.before]["eval"][0]
            run["eval"].insert(0, first | {"of": args.before})
        keep(figure, args.name, run)
    draw_all()


if __name__ == "__main__":
    main()
