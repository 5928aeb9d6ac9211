"""The small pictures of the report: which metrics each shows, and what the page says of it. Draws nothing."""

from dataclasses import dataclass

from whetstone.report.read import Run


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A small picture: which metrics it shows (key and label), and what the page says of it."""

    name: str
    series: tuple[tuple[str, str], ...]
    title: str
    text: str
    percent: bool = False


_CURVES = (
    Curve(
        name="length",
        series=(("completions/mean_length", "mean"),),
        title="Completion length",
        text="Tokens in a completion, on average.",
    ),
    Curve(
        name="entropy",
        series=(("entropy", "entropy"),),
        title="Entropy",
        text="How undecided the policy is at a token; at 0 it explores no more.",
    ),
    Curve(
        name="kl",
        series=(("kl", "KL"),),
        title="KL to the reference",
        text="How far the policy has moved from where it began.",
    ),
    Curve(
        name="variance",
        series=(("frac_reward_zero_std", "equal rewards"), ("frac_answers_identical", "equal answers")),
        title="Prompts without signal",
        text="Fraction of prompts whose completions have equal rewards (zero advantage) or equal answers.",
        percent=True,
    ),
    Curve(
        name="truncated",
        series=(("completions/clipped_ratio", "truncated"),),
        title="Truncated",
        text="Share of completions cut off at max_completion_length.",
        percent=True,
    ),
    Curve(
        name="clip",
        series=(("clip_ratio/region_mean", "clipped"),),
        title="Clip share",
        text="Share of tokens whose ratio was clipped.",
        percent=True,
    ),
    Curve(name="grad", series=(("grad_norm", "norm"),), title="Gradient norm", text="Before it is clipped."),
    Curve(
        name="sampler",
        series=(("sampling/sampling_logp_difference/mean", "difference"),),
        title="Sampler against trainer",
        text="How far the engine's logprobs are from the update's: near 0 is healthy, unless async_rollouts.",
    ),
    Curve(
        name="critic",
        series=(("explained_variance", "explained"),),
        title="Critic",
        text="Share of the returns' variance that the critic foresees; below 0 it harms.",
        percent=True,
    ),
    Curve(
        name="speed",
        series=(("tokens_per_s", "tokens/s"),),
        title="Tokens per second",
        text="Sampled tokens over the time of sampling and updating.",
    ),
    Curve(
        name="mfu",
        series=(("mfu", "MFU"),),
        title="Model flops utilisation",
        text="Of what the device could compute in the time of the update, the share that was needed.",
        percent=True,
    ),
    Curve(
        name="memory",
        series=(("peak_memory_gb", "GB"),),
        title="Peak memory",
        text="Most gigabytes in use in a step, of the first rank's GPU (without one: of its process).",
    ),
)


def curves_of(run: Run) -> list[Curve]:
    """Those that a run has numbers for. A metric that is zero throughout (KL without a reference, truncation
    that never happens) is no picture.
    """
    curves = [c for c in _CURVES if any(value for key, _ in c.series for value in run.column(key)[1])]
    keys = dict.fromkeys(key for row in run.rows for key in row if key.startswith("curriculum/"))
    if keys:
        series = tuple((key, key.removeprefix("curriculum/").removesuffix("/level")) for key in keys)
        text = "Level of difficulty of the training problems, by task."
        curves.append(Curve(name="curriculum", series=series, title="Curriculum", text=text))
    return curves
