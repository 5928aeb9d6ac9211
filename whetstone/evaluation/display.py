"""An evaluation in the terminal: headline, table of tasks, examples."""

import logging
from typing import Any

import rich
from rich.console import Console
from rich.console import Group as Stacked
from rich.padding import Padding
from rich.table import Table as TerminalTable
from rich.text import Text

from whetstone.evaluation.conversation import conversation
from whetstone.evaluation.evaluator import EvalRecord, EvalResult
from whetstone.evaluation.statistics import Accuracy
from whetstone.terminal.log import STEP_LINES
from whetstone.terminal.text import counted, escape_controls, wrap

MOST_MESSAGES = 8  # of a conversation, in the terminal


def print_result(
    result: EvalResult, *, num_examples: int, title: str | None = None, console: Console | None = None
) -> None:
    """Print and log a headline; print a table if there are several tasks, and examples."""
    console = console or rich.get_console()
    title = escape_controls(title or f"Evaluation at step {result.step}")
    line = f"{title}  {headline(result)}"
    text = Text(wrap(line, console.width) if console.is_terminal else line)
    text.stylize("bold", 0, len(title))
    blocks: list[Any] = [_example(record) for record in examples(result, num_examples)]
    if len(result.per_task) > 1:
        blocks.insert(0, _task_table(result))
    console.print(text, highlight=False, soft_wrap=True)
    console.print(Stacked(*(Padding(part, (0, 0, 0, 2), expand=False) for part in blocks)), highlight=False)
    logging.getLogger(STEP_LINES).info("%s: %s", title, headline(result))


def headline(result: EvalResult) -> str:
    """`accuracy 61.5 % [54.6, 68.0] on 200 problems at temperature 1; greedy ...; +27.0 points since ...`"""
    quality = f"reward {format_mean(result.reward)}"
    if result.is_judged:
        quality = f"accuracy {format_accuracy(result.accuracy)}"
    constants = [task.constant for task in result.per_task.values()]
    if result.is_judged and len(constants) == 1 and constants[0]:  # several have a table of their own
        quality += f" (a constant earns {100 * constants[0]:.0f} %)"
    parts = [f"{quality} on {counted(result.accuracy.num_problems, 'problem')}"]
    if result.samples_per_problem > 1:
        parts[0] += f" x {result.samples_per_problem}"
    parts[0] += " greedily" if result.temperature == 0 else f" at temperature {result.temperature:g}"
    if result.greedy_accuracy is not None and result.temperature > 0 and result.is_judged:
        parts.append(f"greedy {format_accuracy(result.greedy_accuracy)}")
    if result.samples_per_problem > 1 and result.is_judged:
        rates = (f"pass@{k} {100 * value:.1f} %" for k, value in result.pass_at_k.items() if k > 1)
        parts.append(", ".join(rates))
    if (delta := result.delta_vs_step0) is not None:
        points = f"{100 * delta.difference:+.1f} points since step 0"
        p_value = "p < 0.001" if delta.p_value < 0.001 else f"p = {delta.p_value:.3f}"
        parts.append(f"{points} [{100 * delta.low:+.1f}, {100 * delta.high:+.1f}], {p_value}")
    if not result.is_judged:
        parts.append(f"{result.mean_length:.0f} tokens a completion")
    if result.clipped_ratio > 0:
        parts.append(f"{100 * result.clipped_ratio:.1f} % truncated")
    if result.num_failures:
        parts.append(f"{counted(result.num_failures, 'answer')} could not be scored: counted as wrong")
    return "; ".join(parts)


def format_accuracy(accuracy: Accuracy) -> str:
    """`61.5 % [54.6, 68.0]`"""
    return f"{100 * accuracy.mean:.1f} % [{100 * accuracy.low:.1f}, {100 * accuracy.high:.1f}]"


def format_mean(mean: Accuracy) -> str:
    """`0.615 [0.546, 0.680]`"""
    return f"{mean.mean:.3g} [{mean.low:.3g}, {mean.high:.3g}]"


def _task_table(result: EvalResult) -> TerminalTable:
    table = TerminalTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("task")
    columns = ["problems", "accuracy %", "95 %"]
    columns += ["since step 0"] if result.delta_vs_step0 is not None else []
    has_constants = any(task.constant for task in result.per_task.values())
    columns += ["a constant %"] if has_constants else []
    for name in (*columns, "tokens"):
        table.add_column(name, justify="right")
    for name, task in result.per_task.items():
        share, versus = task.accuracy, task.delta_vs_step0
        table.add_row(
            Text(escape_controls(name)),
            str(share.num_problems),
            f"{100 * share.mean:.1f}",
            Text(f"[{100 * share.low:.1f}, {100 * share.high:.1f}]"),
            *([f"{100 * versus.difference:+.1f}"] if versus is not None else []),
            *([f"{100 * task.constant:.0f}" if task.constant else ""] if has_constants else []),
            f"{task.mean_length:.0f}",
        )
    return table


def examples(result: EvalResult, num: int) -> list[EvalRecord]:
    """First samples of `num` evenly spaced problems, those that differ from what step 0 showed."""
    firsts = [record for record in result.completions if record.sample == 0]
    num = min(num, len(firsts))
    spaced = (firsts[i * len(firsts) // num] for i in range(num))
    return [record for record in spaced if record.problem not in result.unchanged]


def _example(record: EvalRecord) -> TerminalTable:
    verdict = Text("right", "bold green") if record.correct else Text("wrong", "bold red")
    if not record.is_judged:
        verdict = Text(f"reward {record.reward:.3g}", "bold")
    gold = "" if record.gold is None else f"   gold {_short(record.gold, 120)}"
    answer = "no answer found" if record.answer is None else f"answer {_short(record.answer, 120)}"
    table = TerminalTable.grid(padding=(0, 2, 0, 0))
    table.add_row(Text("question", "dim"), Text(_short(record.messages[-1]["content"], 400)))
    said = conversation(record.turns, record.completion)
    for who, text in said[:MOST_MESSAGES]:
        label = "completion" if len(said) == 1 else who
        table.add_row(Text(escape_controls(label), "dim"), Text(_short(text, 600 if len(said) == 1 else 300)))
    if len(said) > MOST_MESSAGES:
        table.add_row(Text(""), Text(f"and {counted(len(said) - MOST_MESSAGES, 'message')} more", "dim"))
    length = counted(record.length, "token")
    table.add_row(Text("verdict", "dim"), verdict.append(f"   {answer}{gold}   ({length})", ""))
    table.add_row()
    return table


def _short(text: str, limit: int) -> str:
    """One line of at most `limit` characters, without its middle."""
    text = escape_controls(" ".join(text.split()))
    half = (limit - 5) // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"
