"""The table of a comparison: as Markdown, and in the terminal. The numbers are in run/comparison.py."""

from collections.abc import Mapping, Sequence
from typing import Any

import rich
from rich.table import Table
from rich.text import Text

HEADER = ("variant", "seeds", "before %", "after %", "gain [95 %]", "greedy %", "seconds")


def table_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The cells of the table as text, under `HEADER`."""
    return [
        (
            variant["name"],
            str(variant["num_seeds"]),
            _points(variant["accuracy_before"]["mean"]),
            _points(variant["accuracy_after"]["mean"]),
            _gain(variant["gain"]),
            "" if variant["greedy_after"] is None else _points(variant["greedy_after"]["mean"]),
            f"{variant['seconds']:.0f}",
        )
        for variant in results["variants"]
    ]


def versus_lines(results: Mapping[str, Any]) -> list[str]:
    """How each variant differs from the first, a line each; nothing where there is no pair."""
    pairs = [(variant["name"], variant["versus"]) for variant in results["variants"] if variant.get("versus")]
    if not pairs:
        return []
    lines = [f"Accuracy after training, in points, against {pairs[0][1]['from']}:"]
    for name, versus in pairs:
        p_value = "p < 0.001" if versus["p_value"] < 0.001 else f"p = {versus['p_value']:.3f}"
        pairs_of = f"{versus['num_pairs']} {versus['over']}"
        lines.append(f"- {name}: {_gain(versus)}, {p_value}, paired over {pairs_of}")
    if any(versus["over"] == "problems" for _, versus in pairs):
        lines.append("Pairs of problems are of one seed: they do not tell how another seed would come out.")
    return lines


def _points(share: float) -> str:
    return f"{100 * share:.1f}"


def _gain(gain: Mapping[str, float | None]) -> str:
    assert gain["mean"] is not None
    text = f"{100 * gain['mean']:+.1f}"
    if gain["low"] is None or gain["high"] is None:
        return text
    return f"{text} [{100 * gain['low']:+.1f}, {100 * gain['high']:+.1f}]"


def markdown_table(results: Mapping[str, Any]) -> str:
    """table.md: the table over seeds, then every run with its own interval over problems."""
    lines = [f"# Comparison on `{results['config']}`", ""]
    lines += _markdown(HEADER, table_rows(results))
    lines += [
        "",
        "Means over seeds. Gain in points, with Student's t interval over seeds (none with one seed); "
        "greedy: after training, at temperature 0.",
        "",
    ]
    lines += [*versus_lines(results), ""] if versus_lines(results) else []
    runs = [
        (
            variant["name"],
            str(run["seed"]),
            _with_interval(run["accuracy_before"]),
            _with_interval(run["accuracy_after"]),
            "" if run["greedy_after"] is None else _with_interval(run["greedy_after"]),
            f"{run['seconds']:.0f}",
        )
        for variant in results["variants"]
        for run in variant["seeds"]
    ]
    lines += _markdown(("variant", "seed", "before %", "after %", "greedy after %", "seconds"), runs)
    num = results["variants"][0]["seeds"][0]["accuracy_after"]["num_problems"]
    lines += ["", f"Every run by itself, with its 95 % interval over the {num} evaluation problems."]
    lines += [f"\nFailed: {name}: {line}" for name, line in results["failed"].items()]
    if results["missing"]:
        lines += ["", f"Not run yet: {', '.join(results['missing'])}."]
    return "\n".join(lines) + "\n"


def _with_interval(accuracy: Mapping[str, float]) -> str:
    return f"{_points(accuracy['mean'])} [{_points(accuracy['low'])}, {_points(accuracy['high'])}]"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(header) - 1)]
    cells = [[text.replace("|", "\\|") for text in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *cells)]


def show_table(results: Mapping[str, Any]) -> None:
    """The same in the terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(HEADER[0], overflow="fold", min_width=16)
    for name in HEADER[1:]:
        table.add_column(Text(name), justify="right", no_wrap=True)
    for row in table_rows(results):
        table.add_row(*(Text(text) for text in row))
    console = rich.get_console()
    console.print()
    console.print(table)
    for line in versus_lines(results):
        console.print(line, markup=False, highlight=False)
    for name, line in results["failed"].items():
        console.print(f"{name} failed: {line}", markup=False, highlight=False, style="red")
    if results["missing"]:
        console.print(f"Not run yet: {', '.join(results['missing'])}.", markup=False, highlight=False)
