"""What is worth knowing about a run, in sentences: what went wrong or is not finished, and what to do.

Looks at numbers only; each finding names the number it rests on.
"""

from dataclasses import dataclass

from whetstone.report.read import Run


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A sentence for the reader; `grave` ones ask for something to be done."""

    title: str
    text: str
    grave: bool = True


def findings(run: Run) -> list[Finding]:
    """All findings, the state of the run first."""
    found = [
        _unfinished(run),
        _no_evaluation(run),
        _within_chance(run),
        _truncated(run),
        _no_variance(run),
        _skipped(run),
        _unscored(run),
        _entropy_gone(run),
        _sampler_differs(run),
    ]
    return [finding for finding in found if finding is not None]


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
    versus = run.last.summary.get("versus_start") if run.last else None
    if versus is None or versus["p_value"] < 0.05:
        return None
    return Finding(
        title="The change may be chance",
        text="Without any true change a difference this large comes up with probability "
        f"{versus['p_value']:.2g}. More problems (eval_num_samples), more samples of each or more steps "
        "would tell.",
    )


def _truncated(run: Run) -> Finding | None:
    share = run.recent("truncated_share")
    if share is None or share <= 0.1:
        return None
    return Finding(
        title="Many completions are cut off",
        text=f"{100 * share:.0f} % of recent completions reached max_completion_length before they ended, "
        "and an answer that is cut off earns nothing: raise max_completion_length, "
        "or set mask_truncated_completions.",
    )


def _no_variance(run: Run) -> Finding | None:
    share = run.recent("reward_variance_share")
    if share is None or share >= 0.2:
        return None
    accuracy = run.recent("accuracy") or 0.0
    remedy = (
        "The tasks have become easy: harder ones would teach more."
        if accuracy > 0.8
        else "Raise num_generations or the temperature, or begin with easier problems."
    )
    return Finding(
        title="Little left to learn from",
        text=f"Only {100 * share:.0f} % of recent prompts had completions of differing reward; the others "
        f"have no gradient. {remedy}",
        grave=accuracy <= 0.8,
    )


def _skipped(run: Run) -> Finding | None:
    count = sum(run.column("skipped_steps")[1])
    if not count:
        return None
    return Finding(
        title="Steps were skipped",
        text=f"{count:.0f} optimiser steps had a loss or gradient that was not finite and were left out: "
        "a lower learning_rate or max_grad_norm usually helps.",
    )


def _unscored(run: Run) -> Finding | None:
    count = sum(run.column("scoring_failures")[1])
    if not count:
        return None
    return Finding(
        title="Answers that could not be scored",
        text=f"Scoring hung, crashed or raised on {count:.0f} answers in training, which earned nothing; "
        "a longer reward_timeout_s helps where it was slow.",
    )


def _entropy_gone(run: Run) -> Finding | None:
    _, values = run.column("entropy")
    recent = run.recent("entropy")
    if (
        recent is None
        or len(values) < 10
        or recent > 0.1 * values[0]
        or (run.recent("accuracy") or 0.0) > 0.8
    ):
        return None
    return Finding(
        title="The policy has stopped exploring",
        text=f"Entropy fell from {values[0]:.2g} to {recent:.2g} while accuracy is not yet high: "
        "a lower learning_rate, a KL penalty (beta) or a higher epsilon_high keeps it alive.",
    )


def _sampler_differs(run: Run) -> Finding | None:
    recent = run.recent("sampler_logprob_difference")
    if recent is None or recent < 0.02:
        return None
    return Finding(
        title="Sampler and trainer disagree",
        text=f"The logprobs of the engine and of the update differ by {recent:.3g} a token on average, "
        "which spoils the ratio that the loss is built on.",
    )
