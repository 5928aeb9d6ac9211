"""The HTML of the report: headline, findings, the views of `whet watch`, examples, configuration.

Every text that comes from a run passes `esc`: completions are full of angle brackets.
"""

import html
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whetstone.diagnosis.explain import diagnose, load_history
from whetstone.diagnosis.history import Severity
from whetstone.evaluation.conversation import POLICY, conversation
from whetstone.report.data import page_data
from whetstone.report.examples import Pair, pairs
from whetstone.report.read import Evaluation, Run
from whetstone.terminal.text import counted
from whetstone.watch.bundle import digest, inline_json, read_static, script

# Characters that a browser does not show or that change the order of others: bidirectional controls, some of
# zero width, control characters but tab and newline, and lone surrogates, which can't be encoded.
_UNSEEN = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u2069\\ufeff\\ud800-\\udfff]"
)
CSS = read_static("watch.css") + Path(__file__).with_name("report.css").read_text(encoding="utf-8")


def esc(text: Any) -> str:
    """Text that a model or a file wrote, as text: markup is escaped, what can't be seen is spelled out."""
    seen = _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", str(text))
    return html.escape(seen, quote=True)


def page(run: Run) -> str:
    """The whole document."""
    sections = (_head, _headline, _findings, _views, _examples, _config)
    style, code = f"\n{CSS}\n", f"\n{script('report')}\n"
    # Nothing is fetched, and no other script runs, whatever got into the page.
    policy = (
        f"default-src 'none'; script-src {digest(code)}; style-src {digest(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{esc(run.name)}: report</title>\n<style>{style}</style>\n</head>\n"
        '<body class="report">\n<main>\n'
        + "\n".join(filter(None, (section(run) for section in sections)))
        + "\n<noscript><p>The charts need JavaScript. metrics.jsonl in the run folder has their numbers.</p>"
        "</noscript>\n<footer>Made by whetstone from the files of the run folder. "
        "Bands, bars and brackets are 95 % intervals over problems.</footer>\n</main>\n"
        f'<script type="application/json" id="data">{inline_json(page_data(run))}</script>\n'
        f'<script type="module">{code}</script>\n</body>\n</html>\n'
    )


def duration(seconds: float) -> str:
    """`42 s`, `4 min 31 s`, `2 h 03 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes_left:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _head(run: Run) -> str:
    facts = []
    if "model_name_or_path" in run.config:
        facts.append(f"<b>{esc(run.config['model_name_or_path'])}</b>")
    tasks = list(run.config.get("datasets") or {})
    if tasks:
        more = f" and {len(tasks) - 4} more" if len(tasks) > 4 else ""
        facts.append(f"on <b>{esc(', '.join(tasks[:4]))}</b>{more}")
    if run.rows:
        facts.append(f"<b>{counted(run.num_steps, 'step')}</b>")
    if run.seconds is not None:
        facts.append(f"<b>{duration(run.seconds)}</b>")
    if run.session is not None:
        started = str(run.session.get("started"))[:16].replace("T", " ")
        facts.append(f"{esc(started)}, whetstone {esc(run.session.get('whetstone'))}")
    return (
        f'<p class="eyebrow">whetstone run report</p>\n<h1>{esc(run.name)}</h1>\n'
        f'<p class="facts">{" &nbsp;·&nbsp; ".join(facts)}</p>'
    )


_ARROW = '<div class="arrow" aria-hidden="true">→</div>'


def _headline(run: Run) -> str:
    first, last = run.first, run.last
    if first is None:
        return _headline_of_reward(run)
    parts = [_number("Before" if last else "Accuracy", first, "")]
    if last is not None:
        parts += [_ARROW, _number("After", last, "after"), _verdict(last)]
    return f'<section class="card headline">{"".join(parts)}</section>\n{_headline_note(run.ends)}'


def _number(label: str, evaluation: Evaluation, kind: str) -> str:
    numbers = ("mean", "low", "high")
    if evaluation.is_judged:
        mean, low, high = (f"{100 * evaluation.summary['accuracy'][key]:.1f}" for key in numbers)
        mean += "<small> %</small>"
    else:  # rows without answers: only the reward tells anything
        label = f"Reward {label.lower()}"
        mean, low, high = (f"{evaluation.summary['reward'][key]:.3g}" for key in numbers)
    return (
        f'<div class="number {kind}"><div class="label">{label}, step {evaluation.step}</div>'
        f'<div class="value">{mean}</div><div class="interval">95 %: {low} to {high}</div></div>'
    )


def _verdict(last: Evaluation) -> str:
    versus = last.summary.get("delta_vs_step0")
    if versus is None:
        return ""
    sure = versus["p_value"] < 0.05
    kind = "" if not sure else "up" if versus["difference"] > 0 else "down"
    return (
        f'<div class="verdict {kind}"><strong>{100 * versus["difference"]:+.1f} points</strong>'
        f"<span>95 %: {100 * versus['low']:+.1f} to {100 * versus['high']:+.1f}</span>"
        f"<span>{_p_value(versus['p_value'])}, paired over problems</span></div>"
    )


def _p_value(p: float) -> str:
    if p >= 0.001:
        return f"p = {p:.3f}"
    if p >= 1e-4:
        return "p &lt; 0.001"
    exponent = math.ceil(-math.log10(max(p, 1e-100))) - 1  # p can be 0: too small for a float
    return f"p &lt; 10<sup>&minus;{exponent}</sup>"


def _headline_note(ends: list[Evaluation]) -> str:
    summary = ends[-1].summary
    num, samples = summary["accuracy"]["num_problems"], summary["samples_per_problem"]
    each = f", {samples} samples each" if samples > 1 else ""
    how = "greedily" if summary["temperature"] == 0 else f"at temperature {summary['temperature']:g}"
    notes = [f"{num:,} fixed problems that are not trained on{each}, sampled {how}."]
    greedy = [end.summary["greedy_accuracy"] for end in ends if end.is_judged]
    if any(greedy) and summary["temperature"] > 0:
        shares = [[100 * share[key] for key in ("mean", "low", "high")] for share in greedy if share]
        shown = " → ".join(f"{mean:.1f} % [{low:.1f}, {high:.1f}]" for mean, low, high in shares)
        notes.append(f"Greedy: <b>{shown}</b>.")
    if samples > 1:
        tables = [end.summary["pass_at_k"] for end in ends]
        rates = {k: [f"{100 * t[k]:.1f} %" for t in tables if k in t] for k in tables[-1] if k != "1"}
        notes.append(", ".join(f"pass@{k} <b>{' → '.join(r)}</b>" for k, r in rates.items()) + ".")
    return f'<p class="small">{" ".join(notes)}</p>'


def _headline_of_reward(run: Run) -> str:
    _, rewards = run.column("reward")
    if not rewards:
        return ""
    first, last = rewards[0], run.recent("reward")
    number = '<div class="number {}"><div class="label">{}</div><div class="value">{:.2f}</div></div>'
    return (
        f'<section class="card headline">{number.format("", "Reward at the first step", first)}'
        f"{_ARROW}{number.format('after', 'Reward of late', last)}</section>"
    )


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A sentence for the reader; `grave` ones ask for something to be done."""

    title: str
    text: str
    grave: bool = True


def findings(run: Run) -> list[Finding]:
    """How far the run has come, and what `whet explain` finds wrong with it."""
    verdicts = diagnose(*load_history(run.folder)) if run.rows else []
    problems = [
        Finding(title=verdict.title, text=f"{verdict.evidence} {verdict.remedy}")
        for verdict in verdicts
        if verdict.severity is not Severity.NOTE
    ]
    return [*_state(run), *problems]


def _state(run: Run) -> Iterator[Finding]:
    if run.results is None and run.rows:
        planned = run.config.get("max_steps")
        of_all = f" of {planned}" if isinstance(planned, int) and planned > 0 else ""
        text = f"This report was made at step {run.num_steps}{of_all}; whet report makes it anew any time."
        yield Finding(title="Not finished yet", text=text, grave=False)
    if not run.evaluations:
        yield Finding(
            title="No evaluation",
            text="Nothing was measured on problems outside training: set eval_num_samples to get accuracy "
            "before and after.",
        )
    elif run.last is None and run.rows:
        text = f"There is no evaluation after step {run.evaluations[0].step}: nothing to compare yet."
        yield Finding(title="One evaluation only", text=text, grave=False)
    versus = run.last.summary.get("delta_vs_step0") if run.last else None
    if versus is not None and versus["p_value"] >= 0.05:
        yield Finding(
            title="The change may be chance",
            text="Without any true change a difference this large comes up with probability "
            f"{versus['p_value']:.2g}. More problems (eval_num_samples), more samples of each or more steps "
            "would tell.",
        )


def _findings(run: Run) -> str:
    items = "".join(
        f'<li class="{"" if finding.grave else "quiet"}"><b>{esc(finding.title)}</b>{esc(finding.text)}</li>'
        for finding in findings(run)
    )
    return f'<ul class="findings">{items}</ul>' if items else ""


def _views(run: Run) -> str:
    """Where report.js draws: curves, the groups of the last step, the fixed problems before and after."""
    groups = any((run.folder / "completions").glob("step_*.jsonl"))
    parts = ['<h2>How it went</h2>\n<div id="curves-view"></div>'] if run.rows or run.evaluations else []
    if groups:
        parts.append(_fold("groups", "Groups of the last step that was written, with tokens"))
    if run.evaluations:
        parts.append(_fold("evaluation", "Fixed problems before and after"))
    return "\n".join(parts)


def _fold(view: str, title: str) -> str:
    return f'<details class="view"><summary>{title}</summary><div id="{view}-view"></div></details>'


def _examples(run: Run) -> str:
    examples = "\n".join(_example(pair) for pair in pairs(run))
    if not examples:
        return ""
    lead = (
        "The same problem, answered by the policy at both ends of the run, with the same random numbers."
        if run.last
        else "What the policy answers so far."
    )
    return f'<h2>In its own words</h2>\n<p class="lead">{lead}</p>\n{examples}'


def _example(pair: Pair) -> str:
    sides = "".join(_side(step, answered) for step, answered in pair.sides)
    shown = pair.sides[-1][1]
    gold = "" if shown["gold"] is None else f" &nbsp;·&nbsp; right answer: {esc(shown['gold'])}"
    kind = "sides" if len(pair.sides) == 2 else "sides single"
    return (
        '<article class="card example"><header>'
        f'<div class="meta">{esc(pair.kind)} &nbsp;·&nbsp; {esc(shown["task"])}{gold}</div>'
        f'<div class="question">{esc(shown["messages"][-1]["content"])}</div></header>'
        f'<div class="{kind}">{sides}</div></article>'
    )


def _side(step: int, answered: dict[str, Any]) -> str:
    chip = "right" if answered["correct"] else "wrong"
    text = chip if "correct" in answered["parts"] else f"reward {answered.get('reward', 0.0):.3g}"
    chip = chip if text == chip else ""
    cut = ", cut off" if answered["finish"] == "length" else ""
    length = esc(answered["length"])
    extra = "".join(f"<span>{esc(k)}: {esc(v)}</span>" for k, v in answered.get("extra", {}).items())
    said = conversation(answered.get("turns"), answered["completion"])
    return (
        f'<div class="side"><div class="meta"><span>step {step}</span><span class="chip {chip}">{text}</span>'
        f"<span>{length} tokens{cut}</span>{extra}</div>{_said(said)}</div>"
    )


def _said(messages: list[tuple[str, str]]) -> str:
    """One text, or the turns of a conversation."""
    if len(messages) == 1:
        return f"<pre>{esc(messages[0][1])}</pre>"
    return "".join(
        f'<div class="turn {"said" if who == POLICY else "observed"}"><div class="turn-head">{esc(who)}</div>'
        f"<pre>{esc(text)}</pre></div>"
        for who, text in messages
    )


def _config(run: Run) -> str:
    if not run.config:
        return ""
    keys = "".join(f"<div><dt>{esc(k)}</dt><dd>{esc(_value(v))}</dd></div>" for k, v in run.config.items())
    table = f'<dl class="card config">{keys}</dl>'
    return f'<details class="config-view"><summary>Resolved configuration</summary>{table}</details>'


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | list | dict) else str(value)
