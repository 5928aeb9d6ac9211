"""docs/speed.png: what was kept in benchmarks/results, to look at.

    python benchmarks/picture.py

One whole GRPO step by stage, sampling beside vLLM, one update beside TRL and the padded way. Reads rows,
measures nothing; rows that are missing are left out.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from contest import HERE, Row
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rollout_work import SIZES
from step import fastest

from whetstone.commands.compare.plot import COLORS, INK, LINE, MUTED
from whetstone.commands.compare.plot import STYLE as PLAIN

PICTURE = HERE.parent / "docs" / "speed.png"
OURS, THEIRS, OTHER = COLORS[0], "#8b9499", LINE
STAGES = {"generation_s": OURS, "update_s": COLORS[1], "sync_s": COLORS[2]}
NAMES = {
    "ours": "whetstone",
    "trl_vllm_uncorrected": "TRL + vLLM, bf16 weights,\nno importance weights",
    "trl_vllm": "TRL + vLLM, bf16 weights",
    "trl_vllm_float32": "TRL + vLLM, float32 weights",
    "trl_generate": "TRL + generate",
}
STYLE: dict[Any, Any] = {**PLAIN, "axes.spines.left": False, "axes.grid": False, "xtick.major.size": 0}


def rows_of(name: str) -> list[Row]:
    return json.loads((HERE / "results" / f"{name}.json").read_text())["rows"]


def whole_step(axes: Any) -> None:
    rows = sorted(fastest(rows_of("step")), key=lambda row: row["total_s"], reverse=True)
    for place, row in enumerate(rows):
        left = 0.0
        for stage, colour in STAGES.items():
            label = stage.removesuffix("_s") if place == 0 else None
            axes.barh(place, row[stage], 0.62, left=left, color=colour, label=label)
            left += row[stage]
        axes.text(left + 0.4, place, f"{row['total_s']:.1f} s", va="center")
    axes.set_yticks(range(len(rows)), [NAMES[row["who"]] for row in rows], color=INK)
    axes.set_title("One GRPO step at 1.5 B, 32 prompts x 8 x 512 tokens: seconds")
    axes.legend(loc="upper right")
    axes.set_xlim(0, 1.12 * max(row["total_s"] for row in rows))


def beside(axes: Any, title: str, columns: Sequence[tuple[str, str, str]], found: Callable) -> None:
    """Groups of bars, one group for each size; `columns`: whose, their name, colour."""
    width = 0.8 / len(columns)
    for number, (who, name, colour) in enumerate(columns):
        places = [place + (number - (len(columns) - 1) / 2) * width for place in range(len(SIZES))]
        heights = [found(who, size) for size in SIZES]
        known = [(place, height) for place, height in zip(places, heights, strict=True) if height]
        axes.bar(*zip(*known, strict=True), 0.94 * width, color=colour, label=name)
        for place, height in known:
            axes.text(place, height, f"{height / 1000:.0f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(SIZES)), [size.replace("b", " B") for size in SIZES])
    axes.set_yticks([])
    axes.set_title(title)
    axes.legend(loc="upper right")


def sampling(axes: Any) -> None:
    kept = {
        (row["who"], row["size"]): row["tokens_per_s"]
        for row in rows_of("rollout")
        if row["num_sequences"] == 256 and row["shape"] == "full"
    }
    columns = [
        ("native", "whetstone, native engine", OURS),
        ("vllm", "vLLM 0.24", THEIRS),
        ("vllm without logprobs", "without logprobs", OTHER),
    ]
    title = "Sampling, 256 sequences of 512 tokens: thousand tokens/s"
    beside(axes, title, columns, lambda who, size: kept.get((who, size)))


def update(axes: Any) -> None:
    kept: dict[tuple[str, str], float] = {}
    for row in rows_of("update"):
        if row["shape"] not in ("ragged", "full"):
            continue
        key = (row["who"], row["size"])
        kept[key] = max(kept.get(key, 0), row.get("tokens_per_s", 0))
    columns = [("ours", "whetstone", OURS), ("trl", "TRL", THEIRS), ("padded", "padded, plain", OTHER)]
    title = "One update, 256 completions: thousand tokens/s"
    beside(axes, title, columns, lambda who, size: kept.get((who, size)))


def draw(path: Path = PICTURE) -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 6.2), layout="constrained")
        grid = figure.add_gridspec(2, 2)
        whole_step(figure.add_subplot(grid[0, :]))
        sampling(figure.add_subplot(grid[1, 0]))
        update(figure.add_subplot(grid[1, 1]))
        figure.supxlabel(
            "One H200, Qwen2.5 shapes with random weights, 2026-11-15 and 16; TRL 1.16 (float32 weights: "
            "in a later run than the other steps).\nvLLM waits for its host: at 1.5 B it had 18 to 34 k "
            "tokens/s on four hosts, 30 to 51 k without logprobs. Settings: docs/lab; rows: "
            "benchmarks/results",
            fontsize=8,
            color=MUTED,
        )
        FigureCanvasAgg(figure).print_figure(path, dpi=130, format="png")


if __name__ == "__main__":
    draw()
    print(PICTURE)
