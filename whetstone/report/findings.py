"""What is worth knowing about a run: how far it has come, and what `whet explain` finds wrong with it."""

from collections.abc import Iterator
from dataclasses import dataclass

from whetstone.diagnosis.explain import diagnose, load_history
from whetstone.diagnosis.history import Severity
from whetstone.report.read import Run


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A sentence for the reader; `grave` ones ask for something to be done."""

    title: str
    text: str
    grave: bool = True


def findings(run: Run) -> list[Finding]:
    """All findings, the state of the run first."""
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
