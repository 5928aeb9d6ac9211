"""Checks as in `checks.py`, for what not every run has: clipping, masks, a critic, a curriculum ..."""

import math

from whetstone.diagnosis.history import Diagnosis, RunHistory, Severity, percent

ENOUGH_ROWS = 10  # fewer say nothing about whether something learns or is stuck


def critic_harms(history: RunHistory) -> Diagnosis | None:
    """The critic's values are worse than a constant, or it does not learn."""
    losses, explained = history.column("value_loss"), history.late("explained_variance")
    if len(losses) < ENOUGH_ROWS or explained is None:
        return None
    early, late = history.early("value_loss") or 0.0, history.recent("value_loss")
    if explained >= 0 and (late < 0.9 * early or explained > 0.1):
        return None
    worse = explained < 0
    return Diagnosis(
        title="The critic harms: it is worse than a constant" if worse else "The critic does not learn",
        evidence=f"It explains {percent(explained)} of the variance of the recent returns"
        f"{' (below 0 %: a constant would be nearer)' if worse else ''}; its loss went from {early:.3g} to "
        f"{late:.3g} at a critic_learning_rate of {history.config.get('critic_learning_rate')}.",
        remedy="Raise critic_learning_rate (1e-3 to 1e-2 for critic: head, ten times learning_rate for "
        "critic: model), give it critic_warmup_steps=10 before the policy moves, set value_clip to none or "
        "gae_lambda nearer to 1; or use groups instead (advantage=group), which need no critic.",
        severity=Severity.GRAVE if explained < -0.5 else Severity.WARNING,
    )


def dynamic_sampling_wastes(history: RunHistory) -> Diagnosis | None:
    """Most of what is sampled is thrown away."""
    extra = history.recent("dynamic_sampling/resample_ratio")
    wasted = extra / (1 + extra)
    if wasted <= 0.5:
        return None
    accuracy = history.recent("accuracy")
    direction = "harder" if accuracy > 0.5 else "easier"
    return Diagnosis(
        title="Dynamic sampling throws most samples away",
        evidence=f"{extra:.2g} prompts were sampled again for each that is learnt from: {percent(wasted)} of "
        f"all samples taught nothing, at an accuracy in training of {percent(accuracy)} among those kept.",
        remedy=f"Make the problems {direction} (the settings under datasets, or a curriculum), raise "
        "num_generations so that rewards differ within a prompt, or lower dynamic_sampling_max_rounds.",
    )


def local_kl_idle(history: RunHistory) -> Diagnosis | None:
    """A KL against the policy that sampled is 0 at the first update of a batch."""
    config = history.config
    if not config.get("beta") or config.get("kl_reference") != "rollout":
        return None
    kl = history.recent("kl")
    if history.updates_per_batch > 1 and kl > 1e-6:
        return None
    why = (
        "each batch is used for one update, before which the policy is the one it is compared with"
        if history.updates_per_batch == 1
        else "the policy hardly moves within a batch"
    )
    return Diagnosis(
        title="The local KL has no effect",
        evidence=f"kl_reference is rollout and beta {config['beta']}, but the recent KL is {kl:.2g}: {why}.",
        remedy="Set num_iterations or steps_per_generation higher, or kl_reference=base to stay near the "
        "first weights; with beta=0 nothing would change now.",
    )


def entropy_bonus_pinned(history: RunHistory) -> Diagnosis | None:
    """The adaptive bonus has come to its end, and the entropy has not reached its target."""
    coef, entropy = history.late("entropy_coef"), history.late("entropy")
    most, target = history.config.get("entropy_coef_max"), history.config.get("entropy_target")
    if coef is None or entropy is None or most is None or target is None:
        return None
    if coef < 0.999 * float(most) or entropy >= float(target):
        return None
    return Diagnosis(
        title="The entropy bonus is at its bound",
        evidence=f"entropy_coef has risen to its maximum, {float(most):g}, and the entropy is {entropy:.3g}, "
        f"still below entropy_target {float(target):g}.",
        remedy="Raise entropy_coef_max, or lower learning_rate so that less entropy is lost; a lower "
        "entropy_target where that much is not needed.",
    )


def answers_are_noise(history: RunHistory) -> Diagnosis | None:
    """Entropy rises far beyond that of the first answers, and the rewards hold: text that nobody can read."""
    risen = history.risen_entropy()
    if risen is None or history.fall() is not None:  # with a fall it is the learning rate
        return None
    coef = history.late("entropy_coef") or history.config.get("entropy_coef") or 0.0
    cause = f"Lower entropy_coef tenfold (it is {float(coef):.2g})" if coef else "Lower learning_rate"
    return Diagnosis(
        title="The answers become noise",
        evidence=f"Entropy per token rose from {risen[0]:.2g} to {risen[1]:.2g}. The {history.measure} holds "
        f"({history.shown(history.score)}), but read the text around the answers.",
        remedy=f"{cause}, or hold the policy near its start with a KL penalty (beta=0.01).",
    )


def beta_overrun(history: RunHistory) -> Diagnosis | None:
    """The adaptive beta grows and grows, and the KL stays beyond its target."""
    beta, kl = history.late("beta"), history.late("kl")
    target, first = history.config.get("target_kl"), float(history.config.get("beta") or 0.0)
    if beta is None or kl is None or target is None or len(history.rows) < ENOUGH_ROWS:
        return None
    if kl <= 2 * float(target) or beta <= 2 * first:
        return None
    return Diagnosis(
        title="The adaptive beta can't hold the KL",
        evidence=f"beta has grown from {first:g} to {beta:.3g}, and the KL is {kl:.3g}, over twice "
        f"target_kl ({float(target):g}).",
        remedy="Begin with a larger beta, lower learning_rate, or allow more with a larger target_kl.",
    )


def samples_too_old(history: RunHistory) -> Diagnosis | None:
    """One batch of updates moves the policy so far that the importance weights are cut."""
    if not history.config.get("async_rollouts"):
        return None
    names = ("sampling/importance_sampling_clipped_ratio", "masked_ratio/importance_correction")
    share = max(history.recent(name) for name in names)
    difference = history.recent("sampling/sampling_logp_difference/mean")
    if share <= 0.2 and difference < 0.5:
        return None
    return Diagnosis(
        title="The samples are too old for the update",
        evidence=f"They are one batch behind (async_rollouts). {percent(share)} of the recent tokens had an "
        f"importance weight beyond importance_correction_max "
        f"({history.config.get('importance_correction_max')}); logprobs moved by {difference:.2g} a token on "
        "average from one batch to the next.",
        remedy="The policy moves too far in a batch: lower learning_rate, num_iterations or "
        "steps_per_generation; or set async_rollouts=0, which samples with the newest weights.",
        severity=Severity.GRAVE if share > 0.5 else Severity.WARNING,
    )


def longest_holds_up(history: RunHistory) -> Diagnosis | None:
    """A few completions go on to the limit, and sampling takes most of a step because of them."""
    mean, longest = history.recent("completions/mean_length"), history.recent("completions/max_length")
    share = history.recent("time/rollout") / max(1e-9, history.recent("step_time"))
    cut = history.recent("completions/clipped_ratio")
    if longest < 8 * mean or share < 0.6 or cut > 0.05 or not mean or history.config.get("async_rollouts"):
        return None
    return Diagnosis(
        title="Batches wait for their longest completion",
        evidence=f"Sampling takes {percent(share)} of a step. The longest completion of a batch has "
        f"{longest:,.0f} tokens, the mean is {mean:,.0f}, and {percent(cut)} reach the limit.",
        remedy=f"Lower max_completion_length ({history.config.get('max_completion_length')}): an answer that "
        "reaches it is seldom right. Or let the update run meanwhile (async_rollouts=1).",
    )


def curriculum_stuck(history: RunHistory) -> Diagnosis | None:
    """A task stays at its level although it has been tried often enough."""
    datasets = history.config.get("datasets")
    stuck = []
    for task, spec in (datasets if isinstance(datasets, dict) else {}).items():
        ladder = spec.get("curriculum") if isinstance(spec, dict) else None
        levels, accuracy = history.column(f"curriculum/{task}/level"), history.late(f"accuracy/{task}")
        if not isinstance(ladder, dict) or not levels or accuracy is None:
            continue
        same = next((n for n, level in enumerate(reversed(levels)) if level != levels[-1]), len(levels))
        seen = same * history.completions_per_row / max(1, len(datasets or {}))
        if same >= ENOUGH_ROWS and seen >= 3 * ladder["window"] and accuracy < ladder["up"]:
            stuck.append((accuracy, task, levels[-1], same, ladder))
    if not stuck:
        return None
    accuracy, task, level, same, ladder = min(stuck, key=lambda entry: entry[0])
    return Diagnosis(
        title="The curriculum is stuck",
        evidence=f"{task} has been at level {level:g} for {same} steps; {percent(accuracy)} of its recent "
        f"answers are right, and {percent(ladder['up'])} (up) would take it higher.",
        remedy="This level is too hard to begin with: set a lower start, or down=0.1 so that it can go back."
        if accuracy < 0.1
        else "Give it more steps if accuracy still rises; else lower `up`, or raise num_generations or "
        "learning_rate.",
    )


def clipped(history: RunHistory) -> Diagnosis | None:
    """Everything clipped: tokens outside the clip have no gradient."""
    share, config = history.recent("clip_ratio/region_mean"), history.config
    if share <= 0.3:
        return None
    return Diagnosis(
        title="Most of the update is clipped",
        evidence=f"{percent(share)} of the recent tokens had a ratio outside the clip (epsilon "
        f"{config.get('epsilon')}, epsilon_high {config.get('epsilon_high')}) and gave no gradient, at "
        f"{history.updates_per_batch} updates a batch.",
        remedy="The policy moves too far within a batch: lower learning_rate, num_iterations or "
        "steps_per_generation; or widen epsilon and epsilon_high.",
        severity=Severity.GRAVE if share > 0.8 else Severity.WARNING,
    )


def removed(history: RunHistory) -> Diagnosis | None:
    """Everything masked: some mechanism leaves hardly a token to learn from."""
    masks = {
        "truncated_completions": (
            "mask_truncated_completions",
            "Raise max_completion_length, or set mask_truncated_completions=false.",
        ),
        "off_policy": (
            "off_policy_mask_threshold",
            "Raise off_policy_mask_threshold, or make fewer updates a batch.",
        ),
        "importance_correction": (
            "importance_correction",
            "Engine and trainer disagree: see that both use the same precision, and that "
            "importance_correction_max is not too near 1.",
        ),
    }
    share, mask = max((history.recent(f"masked_ratio/{mask}"), mask) for mask in masks)
    setting, remedy = masks[mask]
    if share <= 0.5:
        return None
    return Diagnosis(
        title="Most tokens are left out of the loss",
        evidence=f"{setting} removed {percent(share)} of the recent tokens (masked_ratio/{mask}).",
        remedy=remedy,
        severity=Severity.GRAVE if share > 0.9 else Severity.WARNING,
    )


def sampler_differs(history: RunHistory) -> Diagnosis | None:
    """The engine sampled from other probabilities than the trainer computes."""
    late, config = history.recent("sampling/sampling_logp_difference/mean"), history.config
    if config.get("async_rollouts") or config.get("top_k") or config.get("min_p"):
        return None  # samples one batch old differ by what was learnt, the others without a bound
    allowed = (0.05 if config.get("bf16") else 0.02) - math.log(float(config.get("top_p") or 1.0))
    if late < allowed:
        return None
    return Diagnosis(
        title="Engine and trainer disagree about logprobs",
        evidence=f"They differ by {late:.2g} a token on average (rounding alone: below 0.001 in float32, "
        "about 0.01 in bf16), which spoils the ratio that the loss is built on.",
        remedy="Set importance_correction=token_truncate to weigh it out; look for the cause in precision "
        "(bf16), in old weights of the engine, or in top_p, top_k and min_p; rollout_engine=native has none "
        "of it.",
        severity=Severity.GRAVE if late > 0.1 else Severity.WARNING,
    )


ALGORITHM_CHECKS = (
    clipped, removed, sampler_differs, critic_harms, samples_too_old, entropy_bonus_pinned, answers_are_noise,
    beta_overrun, local_kl_idle, dynamic_sampling_wastes, longest_holds_up, curriculum_stuck,
)  # fmt: skip
