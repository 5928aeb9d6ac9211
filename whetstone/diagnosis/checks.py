"""The single checks behind `whet explain`: each looks at a run's numbers for one known trouble.

A check is a pure function RunHistory -> Diagnosis | None. `explain.py` calls and sorts them all.
"""

from statistics import median

from whetstone.diagnosis.checks_algorithm import clipped, removed
from whetstone.diagnosis.history import Diagnosis, RunHistory, Severity, percent
from whetstone.terminal.text import times

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
    share, accuracy = history.reward_variance, history.late("accuracy")
    failure = failed(history)  # then there is nothing to learn from answers that were never judged
    is_failing = failure is not None and failure.severity is Severity.GRAVE and not history.score
    if share is None or share >= LITTLE_VARIANCE or is_solved(history) or is_failing:
        return None
    title, remedy = _why_no_variance(history, accuracy)
    gain = history.gain if history.rose else None
    measure = history.measure.capitalize()
    learned = "" if gain is None else f"{measure} is {history.shown_gain(gain)} since the start, but now "
    evidence = (
        f"{learned}{'only' if learned else 'Only'} {percent(share)} of the recent prompts had completions of "
        "differing reward, and only these have a gradient: the advantage is the reward minus its baseline. "
        f"Recent reward {history.recent('reward'):.3g} with a standard deviation of "
        f"{history.recent('reward_std'):.2g}, loss {history.recent('loss'):.2g}, gradient norm "
        f"{history.recent('grad_norm'):.2g}."
    )
    evidence += "" if accuracy is None else f" Recent accuracy in training {percent(accuracy)}."
    unread = history.evals[-1].get("no_answer_ratio") if history.evals else None
    if accuracy is not None and accuracy <= 0.05 and unread is not None and unread > 0.5:
        evidence += f" No answer was found in {percent(unread)} of the newest evaluation's completions."
        remedy = (
            "First teach it the form of an answer (a short supervised warm-up, a clearer developer_prompt or "
            f"reward_funcs: [accuracy, format]). {remedy}"
        )
    grave = accuracy < MOSTLY_SOLVED if accuracy is not None else not history.rose
    severity = Severity.GRAVE if grave else Severity.WARNING
    return Diagnosis(title=title, evidence=evidence, remedy=remedy, severity=severity)


def _why_no_variance(history: RunHistory, accuracy: float | None) -> tuple[str, str]:
    if accuracy is not None and accuracy <= 0.05:
        return (
            "No reward variance: all answers are wrong",
            "Make the problems easier (the settings under datasets) until some answers are right, raise "
            "num_generations so that a rare right one is met, or begin from a stronger model_name_or_path.",
        )
    if history.rose if accuracy is None else accuracy >= MOSTLY_SOLVED:
        return (
            "Little reward variance: most prompts are solved",
            "dynamic_sampling=true replaces them by prompts that still teach something; harder problems (the "
            "settings under datasets, or a curriculum) do as well. Or stop here.",
        )
    if history.recent("reward_std", 1.0) == 0:
        return (
            "No reward variance: every answer is paid the same",
            "reward_funcs pays all answers alike: add `accuracy` if right answers are known, or let your own "
            "function return more for a better answer (check reward_weights for a 0).",
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
            evidence=f"reward_funcs is {sorted(names)}; recent parts of the reward: {parts}; "
            f"{history.measure} {history.shown(history.score)}.",
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
        evidence=f"The format part of the reward rose from {early:.2g} to {late:.2g}, {history.measure} by "
        f"{history.shown_gain(history.gain)} to {history.shown(history.score)}.",
        remedy="It learns what is easiest first. Go on if that was recent; else lower the weight of format "
        "(reward_weights=[1,0.1] for reward_funcs=[accuracy,format]) or make the problems easier.",
    )


def truncated(history: RunHistory) -> Diagnosis | None:
    """Everything truncated: an answer that is cut off earns nothing."""
    share = history.recent("completions/clipped_ratio")
    if share <= 0.1:
        return None
    masked = history.config.get("mask_truncated_completions")
    mask = "" if masked else "keep them out of the loss (mask_truncated_completions=true) or "
    return Diagnosis(
        title=f"{'Most' if share > 0.5 else 'Many'} completions are cut off",
        evidence=f"{percent(share)} of the recent completions reached max_completion_length "
        f"({history.config.get('max_completion_length')}) before they ended; mean length "
        f"{history.recent('completions/mean_length'):.0f}, longest "
        f"{history.recent('completions/max_length'):.0f} tokens. A truncated answer is usually wrong.",
        remedy=f"Raise max_completion_length. If that is not possible, {mask}reward short answers "
        "(reward_funcs=[accuracy,length] with overlong_buffer_length).",
        severity=Severity.GRAVE if share > 0.5 else Severity.WARNING,
    )


def entropy_gone(history: RunHistory) -> Diagnosis | None:
    """The policy stopped exploring before it was good."""
    early, late = history.column("entropy")[:1], history.late("entropy")
    if history.is_supervised:  # to imitate is to become sure
        return None
    solved = history.is_judged and history.score > 0.8
    if not early or late is None or len(history.rows) < 5 or solved or late > 0.1 * early[0]:
        return None
    return Diagnosis(
        title="Entropy is gone: the policy has stopped exploring",
        evidence=f"Entropy per token fell from {early[0]:.2g} to {late:.2g} while {history.measure} is "
        f"{history.shown(history.score)}: it gives the same answers again and again.",
        remedy="Lower learning_rate, raise epsilon_high (0.28), add entropy_coef=0.001 or a KL penalty "
        "(beta=0.01), and begin anew or from a checkpoint before the fall: entropy seldom comes back.",
        severity=Severity.GRAVE,
    )


def learning_rate_too_low(history: RunHistory) -> Diagnosis | None:
    """Rewards differ, accuracy is flat, and nothing about the policy moved."""
    rates, variance = history.column("learning_rate"), history.reward_variance or 0.0
    if history.in_warmup:
        return None
    if rates and max(rates) == 0:
        return Diagnosis(
            title="The learning rate is 0",
            evidence=f"It was 0 in all {len(rates)} rows (gradient norm "
            f"{history.recent('grad_norm'):.2g}): the weights never moved.",
            remedy="Set learning_rate above 0; look also at warmup_steps and lr_scheduler_type.",
            severity=Severity.GRAVE,
        )
    moved = history.rose or history.rose_in_training or history.fall() or history.recent("kl") > 1e-3
    if len(rates) < 8 or variance < LITTLE_VARIANCE or moved or learning_rate_too_high(history):
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
    """Gradients, KL or whole steps went wild: grave where accuracy fell or steps were skipped."""
    norms, skipped, kl = history.column("grad_norm"), history.lost_steps, history.recent("kl")
    if skipped >= len(history.rows) * history.updates_per_batch:
        return Diagnosis(
            title="No step had a finite loss and gradient",
            evidence=f"All {skipped:.0f} steps were skipped: the weights are still the first ones, so the "
            "learning rate is not the cause.",
            remedy="See that the model itself works (`whet sample MODEL`), set bf16=false or another "
            "attn_implementation, and look for NaN in your own loss or reward function.",
            severity=Severity.GRAVE,
        )
    num, limit = max(3, len(norms) // 5), float(history.config.get("max_grad_norm") or 1.0)
    usual = min(median(norms[:num]), median(norms)) if norms else 0.0
    explodes = len(norms) >= 6 and median(norms[-num:]) > 10 * max(usual, limit)
    signs = []
    if skipped:
        signs.append(f"{skipped:.0f} steps had a loss or gradient that was not finite and were skipped")
    if explodes or max(norms, default=0.0) > 10 * usual > 0:
        signs.append(f"the gradient norm reached {max(norms):.3g}, usually {usual:.2g}")
    if kl > 1:
        signs.append(f"KL to the reference is {kl:.3g} a token")
    if risen := history.risen_entropy():
        signs.append(f"entropy rose from {risen[0]:.2g} to {risen[1]:.2g}: the answers have become noise")
    fall = history.fall()
    few_updates = max(5 * history.updates_per_batch, len(history.rows) // 10)  # a slow fall has other causes
    if fall is not None and fall.is_collapse and fall.fell_step - fall.best_step <= few_updates:
        signs.append(
            f"{history.measure} fell from {history.shown(fall.best)} at step {fall.best_step} to "
            f"{history.shown(fall.last)} by step {fall.fell_step}"
        )
    is_grave = bool(skipped or (signs and fall))
    if not (is_grave or explodes or kl > 1):
        return None
    title = "The policy has left its reference" if kl > 1 else "The gradient norm has exploded"
    rate = max(history.column("learning_rate"), default=0.0)
    lower = f" ({rate / 10:.2g} instead of {rate:.2g})" if rate else ""
    return Diagnosis(
        title="The learning rate is too high" if is_grave else title,
        evidence=f"{signs[0][0].upper()}{'; '.join(signs)[1:]}.",
        remedy=f"Lower learning_rate tenfold{lower}, give it warmup_steps, and keep max_grad_norm at 1 or "
        "below; go on from a checkpoint before the damage (resume_from_checkpoint) or begin anew.",
        severity=Severity.GRAVE if is_grave else Severity.WARNING,
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
        f"{fall.of_what.capitalize()} was {history.shown(fall.best)} at step {fall.best_step} and is "
        f"{history.shown(fall.last)} now; half of that was lost by step {fall.fell_step}. On the way there: "
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
        evidence=f"{fall.of_what.capitalize()} was {history.shown(fall.best)} before the first step and is "
        f"{history.shown(fall.last)} now{length}.",
        remedy="Read the given solutions beside the model's own: where they are shorter or of another kind, "
        "they cost what the model could do. Take fewer steps or a lower learning_rate, its own right answers "
        "(rejection_sampling=true), or begin with RL.",
        severity=Severity.GRAVE,
    )


def learned_by_heart(history: RunHistory) -> Diagnosis | None:
    """Accuracy rises in training, and in the evaluation by less than half of that, if at all."""
    if len(history.evals) < 2 or not history.rose_in_training:
        return None
    early, late = history.early(history.measure) or 0.0, history.recent(history.measure)
    first, last = (float(history.evals[at][history.measure]) for at in (0, -1))
    most = last - first + 2 * history.standard_error(history.evals[0], history.evals[-1])
    if history.rose or last >= late or most >= (late - early) / 2:
        return None
    passes = history.column("epoch")[-1:]
    seen = f"; every training problem was seen {times(passes[0])}" if passes and passes[0] > 1 else ""
    return Diagnosis(
        title="It learns its training problems, not others",
        evidence=f"{history.measure.capitalize()} in training rose from {history.shown(early)} to "
        f"{history.shown(late)}, on the evaluation problems it was {history.shown(first)} and is "
        f"{history.shown(last)}{seen}.",
        remedy="Give it more and more varied problems (rows, or the settings under datasets) and fewer "
        "passes (max_steps). If the evaluation has other problems on purpose, train on some like them.",
        severity=Severity.GRAVE,
    )


def failed(history: RunHistory) -> Diagnosis | None:
    """Answers that could not be scored, or whose environment failed, earn nothing, right or not."""
    count, episodes = sum(history.column("scoring_failures")), history.recent("episodes/failed_ratio")
    share = count / max(1, history.completions_per_row * len(history.rows))
    if episodes > share:
        title, cause = (
            "The environment failed in some episodes",
            f"The environment failed in {percent(episodes)}",
        )
        cause += " of the recent episodes"
        remedy = "completions/ has the reasons. Fix the environment (`whet play` runs one episode), or raise "
        remedy += "environment_timeout_s if it was slow."
    elif count:
        title = "Scoring failed on some answers"
        cause = f"Scoring hung, crashed or raised on {count:.0f} answers in training ({percent(share)})"
        remedy = "training.log says why. Where it was slow raise reward_timeout_s or reward_workers; where "
        remedy += "your own reward function raised, fix it."
    else:
        return None
    first = history.rows[-1].get("failures", {}).get("environment" if episodes > share else "scoring")
    shown = f" One of them: {first}." if first else ""
    return Diagnosis(
        title=title,
        evidence=f"{cause}, which earned nothing even if they were right.{shown}",
        remedy=remedy,
        severity=Severity.GRAVE if max(share, episodes) > 0.05 else Severity.WARNING,
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
    failed, collapse, worse_by_imitation, learned_by_heart, learning_rate_too_high,
    only_form_is_paid, learning_rate_too_low, truncated, no_variance, entropy_gone, loss_near_zero,
)  # fmt: skip
