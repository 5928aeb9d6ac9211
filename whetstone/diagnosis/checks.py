"""The single checks behind `whet explain`: each looks at a run's numbers for one known trouble.

A check is a pure function RunHistory -> Diagnosis | None. `explain.py` calls and sorts them all.
"""

import math
from statistics import median

from whetstone.diagnosis.history import Diagnosis, RunHistory, Severity, percent

LITTLE_VARIANCE = 0.2  # share of prompts with differing rewards below which hardly anything is learnt
MOSTLY_SOLVED = 0.8  # accuracy in training from which most groups of equal reward are all right
SOLVED = 0.95  # accuracy in training from which missing variance means that all answers are right
FORM_REWARDS = frozenset({"format", "length"})  # what pays for the form of an answer, whatever it says


def is_solved(history: RunHistory) -> bool:
    """Whether rewards no longer differ because nearly all answers are right."""
    variance = history.reward_variance
    return variance is not None and variance < LITTLE_VARIANCE and history.recent("accuracy") >= SOLVED


def no_variance(history: RunHistory) -> Diagnosis | None:
    """Why is my loss 0: groups whose completions all earn the same have no gradient."""
    share, accuracy = history.reward_variance, history.recent("accuracy")
    if share is None or share >= LITTLE_VARIANCE or is_solved(history):
        return None
    title, remedy = _why_no_variance(history, accuracy)
    gain = history.gain if history.rose else None
    learned = "" if gain is None else f"Accuracy is {100 * gain:+.1f} points since the start, but now "
    evidence = (
        f"{learned}{'only' if learned else 'Only'} {percent(share)} of the recent prompts had completions of "
        "differing reward, and only these have a gradient: the advantage is the reward minus the mean of "
        f"its group. Recent accuracy in training {percent(accuracy)}, reward {history.recent('reward'):.3g} "
        f"with a standard deviation of {history.recent('reward_std'):.2g}, loss "
        f"{history.recent('loss'):.2g}, gradient norm {history.recent('grad_norm'):.2g}."
    )
    unread = history.evals[-1].get("no_answer_ratio") if history.evals else None
    if accuracy <= 0.05 and unread is not None and unread > 0.5:
        evidence += f" No answer was found in {percent(unread)} of the newest evaluation's completions."
        remedy = (
            "First teach it the form of an answer (a short supervised warm-up, a clearer developer_prompt or "
            f"reward_funcs: [accuracy, format]). {remedy}"
        )
    grave = accuracy < MOSTLY_SOLVED
    severity = Severity.GRAVE if grave else Severity.WARNING
    return Diagnosis(title=title, evidence=evidence, remedy=remedy, severity=severity)


def _why_no_variance(history: RunHistory, accuracy: float) -> tuple[str, str]:
    if accuracy <= 0.05:
        return (
            "No reward variance: all answers are wrong",
            "Make the problems easier (the settings under datasets) until some answers are right, raise "
            "num_generations so that a rare right one is met, or begin from a stronger model_name_or_path.",
        )
    if history.recent("reward_std", 1.0) == 0:
        return (
            "No reward variance: every answer is paid the same",
            "Right and wrong answers both occur, but reward_funcs pays them alike: add `accuracy`, or let "
            "your own function return more for a better answer (check reward_weights for a 0).",
        )
    if accuracy >= MOSTLY_SOLVED:
        return (
            "Little reward variance: most prompts are solved",
            "dynamic_sampling=true replaces them by prompts that still teach something; harder problems (the "
            "settings under datasets, or a curriculum) do as well. Or stop here.",
        )
    return (
        "No reward variance: the completions of a prompt are too much alike",
        "Raise temperature or num_generations, and see that top_p, top_k and min_p do not cut everything but "
        "one token; an entropy_coef of 0.001 to 0.01 keeps the policy exploring, dynamic_sampling=true "
        "replaces prompts that teach nothing.",
    )


def only_form_is_paid(history: RunHistory) -> Diagnosis | None:
    """Format only: the reward rises by its form while the answers do not get better."""
    names = set(history.config.get("reward_funcs") or ["accuracy", "format"])
    if names <= FORM_REWARDS:
        means = {name: history.late(f"rewards/{name}/mean") for name in sorted(names)}
        parts = ", ".join(f"{name} {mean:.2g}" for name, mean in means.items() if mean is not None)
        return Diagnosis(
            title="Format only: nothing is paid for right answers",
            evidence=f"reward_funcs is {sorted(names)}; recent parts of the reward: {parts}; accuracy "
            f"{percent(history.accuracy)}.",
            remedy="Add accuracy: reward_funcs=[accuracy,format].",
            severity=Severity.GRAVE,
        )
    early, late = history.early("rewards/format/mean"), history.late("rewards/format/mean")
    if "format" not in names or early is None or late is None or history.gain is None:
        return None
    if late - early < 0.1 or history.rose or history.gain >= (late - early) / 2:
        return None
    return Diagnosis(
        title="Format only: the reward rises, the answers do not get better",
        evidence=f"The format part of the reward rose from {early:.2g} to {late:.2g}, accuracy by "
        f"{100 * history.gain:+.1f} points to {percent(history.accuracy)}.",
        remedy="It learns what is easiest first. Go on if that was recent; else lower the weight of format "
        "(reward_weights=[1,0.1] for reward_funcs=[accuracy,format]) or make the problems easier.",
    )


def truncated(history: RunHistory) -> Diagnosis | None:
    """Everything truncated: an answer that is cut off earns nothing."""
    share = history.recent("completions/clipped_ratio")
    if share <= 0.1:
        return None
    return Diagnosis(
        title=f"{'Most' if share > 0.5 else 'Many'} completions are cut off",
        evidence=f"{percent(share)} of the recent completions reached max_completion_length "
        f"({history.config.get('max_completion_length')}) before they ended; mean length "
        f"{history.recent('completions/mean_length'):.0f}, longest "
        f"{history.recent('completions/max_length'):.0f} tokens. A truncated answer is usually wrong.",
        remedy="Raise max_completion_length. Where it can't be, keep cut completions out of the loss "
        "(mask_truncated_completions=true) or pay for brevity (reward_funcs=[accuracy,length] with "
        "overlong_buffer_length).",
        severity=Severity.GRAVE if share > 0.5 else Severity.WARNING,
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


def entropy_gone(history: RunHistory) -> Diagnosis | None:
    """The policy stopped exploring before it was good."""
    early, late = history.column("entropy")[:1], history.late("entropy")
    if history.is_supervised:  # to imitate is to become sure
        return None
    if not early or late is None or len(history.rows) < 5 or history.accuracy > 0.8 or late > 0.1 * early[0]:
        return None
    return Diagnosis(
        title="Entropy is gone: the policy has stopped exploring",
        evidence=f"Entropy per token fell from {early[0]:.2g} to {late:.2g} while accuracy is "
        f"{percent(history.accuracy)}: it gives the same answers again and again.",
        remedy="Lower learning_rate, raise epsilon_high (0.28), add entropy_coef=0.001 or a KL penalty "
        "(beta=0.01), and begin anew or from a checkpoint before the fall: entropy seldom comes back.",
        severity=Severity.GRAVE,
    )


def learning_rate_too_low(history: RunHistory) -> Diagnosis | None:
    """Rewards differ, accuracy is flat, and nothing about the policy moved."""
    rates, variance = history.column("learning_rate"), history.reward_variance or 0.0
    if rates and max(rates) == 0:
        return Diagnosis(
            title="The learning rate is 0",
            evidence=f"It was 0 in all {len(rates)} rows (gradient norm "
            f"{history.recent('grad_norm'):.2g}): the weights never moved.",
            remedy="Set learning_rate above 0; look also at warmup_steps and lr_scheduler_type.",
            severity=Severity.GRAVE,
        )
    if len(rates) < 8 or variance < LITTLE_VARIANCE or history.rose or history.recent("kl") > 1e-3:
        return None  # without variance there is no gradient: no learning rate would help
    changes = []
    for metric in ("entropy", "completions/mean_length"):
        early, late = history.early(metric), history.late(metric)
        if not early or late is None or abs(late / early - 1) >= 0.05:
            return None
        changes.append(f"{metric} by {100 * (late / early - 1):+.1f} %")
    kl = history.late("kl")
    changes += [] if kl is None else [f"KL to the reference {kl:.2g}"]
    return Diagnosis(
        title="The learning rate is too low",
        evidence=f"Rewards differ within {percent(variance)} of the recent prompts, so there is a gradient "
        f"(norm {history.recent('grad_norm'):.2g}), but with a learning rate of at most {max(rates):.2g} "
        f"over {len(rates)} rows the policy hardly moved: {', '.join(changes)}.",
        remedy="Raise learning_rate: 1e-6 to 5e-6 is usual for all weights of a model of 1 to 7 billion "
        "parameters, ten times that with LoRA, 1e-4 and more for a tiny model. Look also at warmup_steps and "
        "lr_scheduler_type.",
    )


def learning_rate_too_high(history: RunHistory) -> Diagnosis | None:
    """Accuracy fell while gradients, KL or whole steps went wild."""
    norms, skipped, kl = history.column("grad_norm"), history.total("skipped_steps"), history.recent("kl")
    usual = median(norms) if norms else 0.0
    signs = []
    if skipped:
        signs.append(f"{skipped:.0f} steps had a loss or gradient that was not finite and were skipped")
    if usual > 0 and max(norms) > 10 * usual:
        signs.append(f"the gradient norm reached {max(norms):.3g}, usually {usual:.2g}")
    if kl > 1:
        signs.append(f"KL to the reference is {kl:.3g} a token")
    if risen := history.risen_entropy():
        signs.append(f"entropy rose from {risen[0]:.2g} to {risen[1]:.2g}: the answers have become noise")
    fall = history.fall()
    few_updates = max(5 * history.updates_per_batch, len(history.rows) // 10)  # a slow fall has other causes
    if fall is not None and fall.is_collapse and fall.fell_step - fall.best_step <= few_updates:
        signs.append(
            f"accuracy fell from {percent(fall.best)} at step {fall.best_step} to {percent(fall.last)} by "
            f"step {fall.fell_step}"
        )
    if not skipped and (not signs or fall is None):
        return None
    rate = max(history.column("learning_rate"), default=0.0)
    lower = f" ({rate / 10:.2g} instead of {rate:.2g})" if rate else ""
    return Diagnosis(
        title="The learning rate is too high",
        evidence=f"{signs[0][0].upper()}{'; '.join(signs)[1:]}.",
        remedy=f"Lower learning_rate tenfold{lower}, give it warmup_steps, and keep max_grad_norm at 1 or "
        "below; go on from a checkpoint before the damage (resume_from_checkpoint) or begin anew.",
        severity=Severity.GRAVE,
    )


def collapse(history: RunHistory) -> Diagnosis | None:
    """Why did it collapse: when, and what else changed about then."""
    fall = history.fall()
    if fall is None or (history.is_supervised and fall.best_step == 0):
        return None
    changes = []
    for key, name in (
        ("entropy", "entropy"),
        ("completions/mean_length", "length"),
        ("grad_norm", "gradient norm"),
        ("kl", "KL"),
        ("completions/clipped_ratio", "truncated fraction"),
    ):
        steps = [(row["step"], row[key]) for row in history.rows if row.get(key) is not None]
        before = [value for step, value in steps if step <= fall.best_step + 1]
        after = [value for step, value in steps if step <= fall.fell_step]
        if before and after:
            changes.append(f"{name} {before[-1]:.3g} -> {after[-1]:.3g}")
    evidence = (
        f"{fall.of_what.capitalize()} was {percent(fall.best)} at step {fall.best_step} and is "
        f"{percent(fall.last)} now; half of that was lost by step {fall.fell_step}. On the way there: "
        f"{', '.join(changes) or 'no other metrics'}."
    )
    if fall.is_collapse and not history.is_supervised:
        return Diagnosis(
            title="It collapsed",
            evidence=evidence,
            remedy="Use the checkpoint before the fall (a smaller save_steps keeps more of them; "
            "load_best_model_at_end=true keeps the model of the best evaluation). Then lower "
            "learning_rate, hold the policy near its start (beta=0.01) or make fewer updates a batch; the "
            "verdicts below say which of them the numbers point to.",
            severity=Severity.GRAVE,
        )
    instead = "take fewer steps" if history.is_supervised else "hold the policy near its start (beta=0.01)"
    return Diagnosis(
        title="It was better before",
        evidence=evidence,
        remedy=f"Use a checkpoint near step {fall.best_step} (load_best_model_at_end=true keeps the best "
        "model), and read what has changed in the completions. Let the learning rate fall "
        f"(lr_scheduler_type=linear) or lower it, or {instead}.",
    )


def worse_by_imitation(history: RunHistory) -> Diagnosis | None:
    """Supervised steps after which fewer answers are right than before them."""
    fall = history.fall()
    if fall is None or not history.is_supervised or fall.best_step > 0:
        return None
    lengths = [row.get("completions/mean_length") for row in history.evals]
    first, last = lengths[0], lengths[-1]
    length = "" if first is None or last is None else f"; answers had {first:.0f} tokens and have {last:.0f}"
    return Diagnosis(
        title="Imitation makes the answers worse",
        evidence=f"Accuracy on the evaluation problems was {percent(fall.best)} before the first step and is "
        f"{percent(fall.last)} now{length}.",
        remedy="Read the given solutions beside the model's own: where they are shorter or of another kind, "
        "they cost what the model could do. Take fewer steps or a lower learning_rate, its own right answers "
        "(rejection_sampling=true), or begin with RL.",
        severity=Severity.GRAVE,
    )


def learned_by_heart(history: RunHistory) -> Diagnosis | None:
    """Accuracy rises in training, and in the evaluation by less than half of that, if at all."""
    if len(history.evals) < 2 or not history.rose_in_training:
        return None
    early, late = history.early("accuracy") or 0.0, history.recent("accuracy")
    gain, error = history.evaluated_gain()
    if history.rose or history.accuracy >= late or gain + 2 * error >= (late - early) / 2:
        return None
    passes = history.column("epoch")[-1:]
    seen = f"; every training problem was seen {passes[0]:.2g} times" if passes and passes[0] > 1 else ""
    first, last = (float(history.evals[at]["accuracy"]) for at in (0, -1))
    return Diagnosis(
        title="It learns its training problems, not others",
        evidence=f"Accuracy in training rose from {percent(early)} to {percent(late)}, on the evaluation "
        f"problems it was {percent(first)} and is {percent(last)}{seen}.",
        remedy="Give it more and more varied problems (rows, or the settings under datasets) and fewer "
        "passes (max_steps). If the evaluation has other problems on purpose, train on some like them.",
        severity=Severity.GRAVE,
    )


def scoring_failed(history: RunHistory) -> Diagnosis | None:
    """Answers that could not be scored earn nothing, right or not."""
    count = history.total("scoring_failures")
    if not count:
        return None
    share = count / max(1, history.completions_per_row * len(history.rows))
    return Diagnosis(
        title="Scoring failed on some answers",
        evidence=f"Scoring hung, crashed or raised on {count:.0f} answers in training ({percent(share)}), "
        "which earned nothing even if they were right.",
        remedy="training.log says why. Where it was slow raise reward_timeout_s or reward_workers; where "
        "your own reward function raised, mend it.",
        severity=Severity.GRAVE if share > 0.05 else Severity.WARNING,
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


def loss_near_zero(history: RunHistory) -> Diagnosis | None:
    """A loss near 0 is no trouble where every batch is used once."""
    losses, norm = history.column("loss"), history.recent("grad_norm")
    if not losses or history.updates_per_batch > 1 or norm == 0:
        return None
    mean = sum(abs(loss) for loss in losses) / len(losses)
    if mean > 0.05:
        return None
    return Diagnosis(
        title="A loss near 0 is normal here",
        evidence=f"Mean |loss| {mean:.2g}, recent gradient norm {norm:.2g}. With one update a batch the "
        "ratio is 1 and the loss is minus the mean advantage, which is 0 in every group; its gradient is not "
        "0.",
        remedy="Nothing to change: watch accuracy, reward and grad_norm instead of the loss.",
        severity=Severity.NOTE,
    )


# What a collapse leaves behind: where it was not so before the fall, it is no trouble of its own.
CONSEQUENCES = (truncated, no_variance, removed, clipped)
CHECKS = (
    collapse, worse_by_imitation, learned_by_heart, learning_rate_too_high, only_form_is_paid,
    learning_rate_too_low, truncated, no_variance, clipped, removed, entropy_gone, sampler_differs,
    scoring_failed, loss_near_zero,
)  # fmt: skip
