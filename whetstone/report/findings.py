"""What is worth knowing about a run, in sentences: how far it has come, and what goes wrong in it.

What goes wrong is `whet explain`'s to say: its verdicts stand here as they do there, but for those that find
nothing wrong. Only the state of the run and of its evaluations is judged in this file.
"""

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
    states = [_unfinished(run), _no_evaluation(run), _within_chance(run)]
    return [*(finding for finding in states if finding is not None), *_troubles(run)]


def _troubles(run: Run) -> list[Finding]:
    verdicts = diagnose(*load_history(run.folder)) if run.rows else []
    return [
        Finding(title=verdict.title, text=f"{verdict.evidence} {verdict.remedy}")
        for verdict in verdicts
        if verdict.severity is not Severity.NOTE
    ]


def _unfinished(run: Run) -> Finding | None:
    if run.results is not None or not run.rows:
        return None
    planned = run.config.get("max_steps")
    of_all = f" of {planned}" if isinstance(planned, int) and planned > 0 else ""
    return Finding(
        title="Not finished yet",
        text=f"This report was made at step {run.num_steps}{of_all}; whet report makes it anew any time.",
        grave=False,
    )


def _no_evaluation(run: Run) -> Finding | None:
    if not run.evaluations:
        return Finding(
            title="No evaluation",
            text="Nothing was measured on problems outside training: set eval_num_samples to get accuracy "
            "before and after.",
        )
    if run.last is None and run.rows:
        return Finding(
            title="One evaluation only",
            text=f"There is an evaluation at step {run.evaluations[0].step} and none after it, so there is "
            "nothing to compare yet.",
            grave=False,
        )
    return None


def _within_chance(run: Run) -> Finding | None:
    versus = run.last.summary.get("delta_vs_step0") if run.last else None
    if versus is None or versus["p_value"] < 0.05:
        return None
    return Finding(
        title="The change may be chance",
        text="Without any true change a difference this large comes up with probability "
        f"{versus['p_value']:.2g}. More problems (eval_num_samples), more samples of each or more steps "
        "would tell.",
    )
