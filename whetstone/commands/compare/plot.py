"""compare.png: how accuracy rose in every variant (left), and where it ended (right)."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from whetstone.run.metrics import read_rows

INK, MUTED, LINE = "#1d2327", "#6b7378", "#e4e2dc"
COLORS = (
    "#1f6f78", "#c8793a", "#6a7fb5", "#8a9a4b", "#a05f8a", "#7a6a58", "#3f8f5f", "#b24b4b", "#4a4a6a",
    "#c2a83e",
)  # fmt: skip
STYLE: dict[Any, Any] = {
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "font.size": 9,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "grid.linewidth": 0.7,
}


def curve(folders: list[Path]) -> dict[int, list[float]]:
    """Step -> accuracy of every run, at the steps where all of them were evaluated."""
    runs = []
    for folder in folders:
        rows = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "eval"]
        runs.append({row["step"]: row["accuracy"] for row in rows if "accuracy" in row})
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    return {step: [run[step] for run in runs] for step in steps}


def draw(results: Mapping[str, Any], folders: Mapping[str, Path], path: Path) -> None:
    """Write the picture; `folders` says where each run named in `results` lies."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    variants = results["variants"]
    with matplotlib.rc_context(STYLE):
        height = max(3.8, 1.6 + 0.34 * len(variants))
        figure = Figure(figsize=(11, height), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for number, variant in enumerate(variants):
            color = COLORS[number % len(COLORS)]
            line = "-" if number < len(COLORS) else "--"
            _draw_curve(left, variant, [folders[run["run"]] for run in variant["seeds"]], (color, line))
            _draw_bar(right, variant, len(variants) - 1 - number, color)
        left.set(title="Accuracy on the evaluation problems, % (band: all seeds)", xlabel="step")
        left.xaxis.get_major_locator().set_params(integer=True)
        left.legend(loc="best")
        right.set(title="At the end, % (95 % interval over seeds)")
        right.set_yticks(range(len(variants)), [variant["name"] for variant in reversed(variants)])
        right.tick_params(axis="y", labelcolor=INK)
        right.grid(visible=False, axis="y")
        dots = [run["accuracy_after"]["mean"] for variant in variants for run in variant["seeds"]]
        ends = [variant["accuracy_after"][key] or 0.0 for variant in variants for key in ("mean", "high")]
        high = max(*dots, *ends)
        right.set_xlim(0, min(102, max(10, 105 * high)))
        aside = path.with_name(f".{path.name}")
        FigureCanvasAgg(figure).print_figure(aside, dpi=150, format="png")
        aside.replace(path)


def _draw_curve(axes: Any, variant: Mapping[str, Any], folders: list[Path], style: tuple[str, str]) -> None:
    color, line = style
    points = curve(folders)
    steps = list(points)
    axes.plot(
        steps, [100 * fmean(points[step]) for step in steps], line, color=color, marker="o", markersize=3.5,
        linewidth=1.6, label=variant["name"],
    )  # fmt: skip
    if len(folders) > 1:
        low, high = [100 * min(points[step]) for step in steps], [100 * max(points[step]) for step in steps]
        axes.fill_between(steps, low, high, color=color, alpha=0.14, linewidth=0)


def _draw_bar(axes: Any, variant: Mapping[str, Any], row: int, color: str) -> None:
    after = variant["accuracy_after"]
    axes.barh(row, 100 * after["mean"], height=0.55, color=color, alpha=0.75)
    if after["low"] is not None:
        around = [[100 * (after["mean"] - after["low"])], [100 * (after["high"] - after["mean"])]]
        axes.errorbar(100 * after["mean"], row, xerr=around, color=INK, capsize=3, linewidth=1.1)
    dots = [100 * run["accuracy_after"]["mean"] for run in variant["seeds"]]
    axes.scatter(dots, [row] * len(dots), s=14, color="white", edgecolors=INK, linewidths=0.8, zorder=3)
