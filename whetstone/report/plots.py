"""The pictures of the report, as SVG text to put inside the page. Titles and explanations are the page's.

Colors are placeholders that become the page's CSS variables, and text stays text, so that the pictures follow
light and dark mode.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whetstone.report.read import Run

# What matplotlib is told -> what the page makes of it.
_COLORS = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--line)",
    "#040404": "var(--accent)",
    "#050505": "var(--before)",
    "#060606": "var(--c1)",
    "#070707": "var(--c2)",
    "#080808": "var(--c3)",
    "#090909": "var(--c4)",
    "#0a0a0a": "var(--card)",
}
INK, MUTED, LINE, ACCENT, BEFORE, C1, C2, C3, C4, CARD = _COLORS
SERIES = (ACCENT, C1, C2, C3, C4, BEFORE)

# Widths in inches. Text keeps its size in points, so a picture must be about as wide as what it fills.
WIDE, NARROW = 9.4, 3.4
SMALL = (4.0, 1.85)


def chart_style(ink: str, muted: str, line: str) -> dict[Any, Any]:
    """What the charts of this package share, for matplotlib's rc_context."""
    return {
        "text.color": ink,
        "axes.edgecolor": line,
        "axes.labelcolor": muted,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": line,
        "xtick.color": muted,
        "ytick.color": muted,
        "ytick.major.size": 0,
        "legend.frameon": False,
        "legend.fontsize": 8,
    }


_STYLE: dict[Any, Any] = {
    **chart_style(INK, MUTED, LINE),
    "svg.fonttype": "none",
    "font.size": 8,
    "axes.linewidth": 0.8,
    "axes.spines.left": False,
    "axes.xmargin": 0.01,
    "grid.linewidth": 0.6,
    "xtick.major.size": 0,
    "lines.solid_capstyle": "round",
}


def draw(name: str, size: tuple[float, float], paint: Callable[[Any], None]) -> str:
    """One picture: `paint` is given the axes. `name` keeps its ids apart from those of the other pictures."""
    import matplotlib
    from cycler import cycler
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    cycle = cycler(color=SERIES)
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name, "axes.prop_cycle": cycle}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        axes.grid(visible=False, axis="x")
        paint(axes)
        out = io.StringIO()
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None, "Creator": None})
    return _for_the_page(out.getvalue(), name)


def draw_wide(name: str, height: float, paint: Callable[[Any], None]) -> str:
    """A picture as wide as the page, and the same for a narrow screen: the page's CSS shows one of them."""
    wide = draw(name, (WIDE, height), paint)
    narrow = draw(f"{name}-narrow", (NARROW, max(2.2, height)), paint)
    return f'<div class="on-wide">{wide}</div><div class="on-narrow">{narrow}</div>'


def _for_the_page(svg: str, name: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    # Ids of groups repeat from picture to picture: only those that something refers to are kept, made unique.
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)
    for color, variable in _COLORS.items():
        svg = svg.replace(color, variable)
    return svg.replace("fill: #ffffff", "fill: none").strip()  # what lies behind the whole figure


def accuracy_curve(run: Run) -> str:
    """Accuracy on the fixed problems with its interval; in training and greedily beside it."""

    def paint(axes: Any) -> None:
        steps, shares = run.column("accuracy")
        if steps:
            _line(axes, steps, shares, MUTED, label="in training", weight=1.0)
        if run.evaluations:
            at = [evaluation.step for evaluation in run.evaluations]
            shares = [evaluation.summary["accuracy"] for evaluation in run.evaluations]
            means, low, high = ([share[key] for share in shares] for key in ("mean", "low", "high"))
            axes.fill_between(at, low, high, color=ACCENT, alpha=0.16, linewidth=0)
            axes.errorbar(
                at, means, yerr=_whiskers(means, low, high), color=ACCENT, linewidth=2, marker="o",
                markersize=4, elinewidth=1, capsize=0, label="fixed problems",
            )  # fmt: skip
            beside = [e for e in run.evaluations if e.summary["greedy_accuracy"] and e.summary["temperature"]]
            if beside:
                axes.plot(
                    [e.step for e in beside], [e.summary["greedy_accuracy"]["mean"] for e in beside],
                    linestyle="none", marker="D", markersize=5, markerfacecolor=CARD, markeredgecolor=C1,
                    markeredgewidth=1.4, label="greedy",
                )  # fmt: skip
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        _steps_axis(axes, run)
        _legend(axes)

    return draw_wide("accuracy", 3.1, paint)


def curve(run: Run, series: Mapping[str, str], *, percent: bool = False, wide: bool = False) -> str | None:
    """One or more metrics (metric -> label) over the steps; None where the run has none of them."""
    columns = [(label, *run.column(key)) for key, label in series.items()]
    columns = [(label, steps, values) for label, steps, values in columns if values]
    if not columns:
        return None
    name = re.sub(r"\W", "-", next(iter(series)))

    def paint(axes: Any) -> None:
        for color, (label, steps, values) in zip(SERIES, columns, strict=False):
            _line(axes, steps, values, color, label=label, weight=1.8)
        if percent:
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
        else:
            axes.yaxis.set_major_formatter(lambda value, _: short_number(value))
        if min(min(values) for _, _, values in columns) >= 0:
            axes.set_ylim(bottom=0)
        axes.locator_params(axis="y", nbins=5)
        _steps_axis(axes, run)
        if len(columns) > 1:
            _legend(axes)

    return draw_wide(name, 2.3, paint) if wide else draw(name, SMALL, paint)


def time_stages(run: Run) -> list[str]:
    """The stages whose time was measured and is worth a color (half a per cent), the longest first."""
    keys = {key for row in run.rows for key in row if key.startswith("time/") and key != "step_time"}
    totals = {key: sum(run.column(key)[1]) for key in keys}
    least = 0.005 * sum(totals.values())
    return [key for key in sorted(totals, key=lambda key: -totals[key]) if totals[key] > least]


def time_areas(run: Run) -> str | None:
    """Seconds of each step, stage upon stage."""
    keys = time_stages(run)[: len(SERIES) - 1]
    if not keys:
        return None
    steps = [row["step"] for row in run.rows]
    stages = {key.removeprefix("time/"): [float(row.get(key) or 0.0) for row in run.rows] for key in keys}
    known = [sum(values) for values in zip(*stages.values(), strict=True)]
    whole = [float(row.get("step_time") or 0.0) for row in run.rows]
    rest = [max(0.0, a - b) for a, b in zip(whole, known, strict=True)]
    if sum(rest) > 0.01 * sum(known):
        stages["other"] = rest

    def paint(axes: Any) -> None:
        if len(steps) < 3:
            bottom = [0.0] * len(steps)
            for color, (name, values) in zip(SERIES, stages.items(), strict=False):
                axes.bar(steps, values, 0.4, bottom=bottom, color=color, label=name)
                bottom = [a + b for a, b in zip(bottom, values, strict=True)]
            axes.set_xlim(steps[0] - 1, steps[-1] + 1)
        else:
            colors = SERIES[: len(stages)]
            axes.stackplot(
                steps, *stages.values(), labels=list(stages), colors=colors, alpha=0.85, linewidth=0
            )
        axes.yaxis.set_major_formatter(lambda value, _: f"{short_number(value)} s")
        axes.locator_params(axis="y", nbins=5)
        _steps_axis(axes, run)
        _legend(axes, columns=len(stages))

    return draw_wide("time", 2.3, paint)


def task_bars(run: Run) -> str | None:
    """Accuracy of each task before and after, with intervals."""
    ends = run.ends
    if not ends:
        return None
    names = list(ends[-1].summary["per_task"])
    thickness = 0.34 if len(ends) == 2 else 0.5

    def paint(axes: Any) -> None:
        for i, evaluation in enumerate(ends):
            shares = [evaluation.summary["per_task"].get(name, {}).get("accuracy") for name in names]
            there = [(row, share) for row, share in enumerate(shares) if share is not None]
            means, low, high = ([share[key] for _, share in there] for key in ("mean", "low", "high"))
            whiskers = _whiskers(means, low, high)
            shift = 0.0 if len(ends) == 1 else (i - 0.5) * (thickness + 0.04)
            axes.barh(
                [row + shift for row, _ in there], means, thickness, xerr=whiskers,
                color=(BEFORE, ACCENT)[i + 2 - len(ends)], alpha=0.85, label=f"step {evaluation.step}",
                error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2, "alpha": 0.7},
            )  # fmt: skip
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", labelcolor=INK)
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        _legend(axes)

    return draw_wide("tasks", 0.75 + 0.5 * len(names), paint)


def short_number(value: float) -> str:
    """`0.02`, `3.5`, `120`, `2.3k`: what fits beside an axis."""
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each place (fewer at the beginning)."""
    windows = (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))
    return [math.fsum(recent) / len(recent) for recent in windows]


def _line(axes: Any, steps: list[int], values: list[float], color: str, *, label: str, weight: float) -> None:
    """A few points as they are; many as a pale line under their running mean: single steps are noisy."""
    if len(values) < 20:
        dots = {"marker": "o", "markersize": 2.5 + weight / 2}
        axes.plot(steps, values, color=color, linewidth=weight, label=label, **dots)
        return
    axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
    axes.plot(steps, smooth(values, max(3, len(values) // 20)), color=color, linewidth=weight, label=label)


def _whiskers(means: list[float], low: list[float], high: list[float]) -> list[list[float]]:
    return [
        [max(0.0, m - a) for m, a in zip(means, low, strict=True)],
        [max(0.0, b - m) for m, b in zip(means, high, strict=True)],
    ]


def _steps_axis(axes: Any, run: Run) -> None:
    from matplotlib.ticker import MaxNLocator

    nbins = 8 if _is_wide(axes) else 5
    axes.xaxis.set_major_locator(MaxNLocator(nbins=nbins, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.set_xlabel("step", loc="right", labelpad=0)
    if run.num_steps > 2:
        axes.set_xlim(-0.02 * run.num_steps, 1.02 * run.num_steps)


def _legend(axes: Any, columns: int = 3) -> None:
    columns = columns if _is_wide(axes) else min(columns, 2)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0, handlelength=1.4,
        columnspacing=1.6, labelcolor=MUTED,
    )  # fmt: skip


def _is_wide(axes: Any) -> bool:
    return axes.figure.get_figwidth() > 6
