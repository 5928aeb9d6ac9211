"""The small pictures of the report: which metrics each shows, and what the page says of it. Draws nothing."""

from dataclasses import dataclass

from whetstone.report.read import Run

# metrics of one picture -> its title and its text
_CURVES = {
    "completions/mean_length": ("Completion length", "Tokens in a completion, on average."),
    "entropy": ("Entropy", "How undecided the policy is at a token; at 0 it explores no more."),
    "kl": ("KL to the reference", "How far the policy has moved from where it began."),
    "frac_reward_zero_std frac_answers_identical": (
        "Prompts without signal",
        "Fraction of prompts whose completions have equal rewards (zero advantage) or equal answers.",
    ),
    "completions/clipped_ratio": ("Truncated", "Fraction of completions cut off at max_completion_length."),
    "clip_ratio/region_mean": ("Clip ratio", "Fraction of tokens whose ratio was clipped."),
    "grad_norm": ("Gradient norm", "Before it is clipped."),
    "sampling/sampling_logp_difference/mean": (
        "Sampler against trainer",
        "How far the engine's logprobs are from the update's: near 0 is healthy, unless async_rollouts.",
    ),
    "explained_variance": ("Critic", "Fraction of the returns' variance that it explains; below 0 it harms."),
    "tokens_per_s": ("Tokens per second", "Sampled tokens over the time of sampling and updating."),
    "mfu": ("Model FLOPs utilization", "Fraction of the device's peak that the update needed."),
    "peak_memory_gb": ("Peak memory", "GB in a step, of the first rank's GPU (without one: of its process)."),
}
_LABELS = {"frac_reward_zero_std": "equal rewards", "frac_answers_identical": "equal answers"}
_PERCENT = {*_LABELS, "completions/clipped_ratio", "clip_ratio/region_mean", "explained_variance", "mfu"}


@dataclass(frozen=True, kw_only=True)
class Curve:
    title: str
    text: str
    series: dict[str, str]  # metric -> label
    percent: bool = False


def curves_of(run: Run) -> list[Curve]:
    """The pictures for which a run has numbers. A metric that is always 0 (no truncation) gets none."""
    curves = []
    for metrics, (title, text) in _CURVES.items():
        series = {metric: _LABELS.get(metric, metric) for metric in metrics.split()}
        if any(any(run.column(metric)[1]) for metric in series):
            curves.append(Curve(title=title, text=text, series=series, percent=series.keys() <= _PERCENT))
    levels = dict.fromkeys(key for row in run.rows for key in row if key.startswith("curriculum/"))
    if levels:
        series = {key: key.removeprefix("curriculum/").removesuffix("/level") for key in levels}
        text = "Level of difficulty of the training problems, by task."
        curves.append(Curve(title="Curriculum", text=text, series=series))
    return curves
