"""One drawn configuration, trained for real, and every invariant that it broke.

A run may end in one sentence (UserError). Everything else that is not a finished run is a violation.
"""

import contextlib
import io
import json
import math
import random
import shutil
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.fuzz.draw import arguments, draw
from tests.torture.compare import differences
from whetstone.config import load, make_plan, without_effect
from whetstone.config.sections import ModelConfig
from whetstone.errors import UserError
from whetstone.model.policy import Policy, load_policy
from whetstone.model.size import num_parameters
from whetstone.rewards.builtin import part_names
from whetstone.rollout.collector import ScoringRequest
from whetstone.run.metrics import read_rows
from whetstone.run.setup import TrainingRun
from whetstone.run.sft_start import start_from_sft
from whetstone.train import Step, finish, loop, open_training
from whetstone.train import train as run_training
from whetstone.types import Finish

PROBE = torch.arange(40, 72)[None]


@dataclass
class Result:
    """What came of a seed."""

    seed: int
    settings: dict[str, Any]
    violations: list[str] = field(default_factory=list)
    sentence: str | None = None  # why the run was refused
    checks: Counter[str] = field(default_factory=Counter)  # how often each invariant was looked at
    seconds: float = 0.0


Check = Callable[["Trial"], Iterator[str]]


class Trial:
    """The runs of one configuration."""

    def __init__(self, seed: int, folder: Path, files: Path) -> None:
        self.folder, self.seed = folder, seed
        self.settings = draw(seed, files).settings
        self.result = Result(seed, self.settings)
        self.whole = folder / "whole" / "run"

    def run(self, checks: list[str]) -> Result:
        """The run itself and `checks`, names of `CHECKS`, until one fails."""
        started, is_trained = time.monotonic(), False
        try:
            self.result.violations += [f"run: {text}" for text in self.observed()]
            is_trained = True
            for name in checks:
                if self.result.violations:
                    break
                self.result.violations += [f"{name}: {text}" for text in CHECKS[name](self)]
        except UserError as error:
            self.result.sentence = str(error)
            if is_trained:
                self.result.violations.append(f"trained, and then refused: {error}")
            if "\n" in str(error).strip() or len(str(error)) > 2000:
                self.result.violations.append(f"not one sentence: {error}")
        except Exception:
            self.result.violations.append(traceback.format_exc(limit=-6))
        self.result.seconds = time.monotonic() - started
        return self.result

    def train(self, name: str, **changes: Any) -> Path:
        """Another run; returns its folder."""
        settings = {**self.settings, **changes, "output_dir": str(self.folder / name)}
        with quiet():
            run_training(load(None, arguments(settings)))
        return self.folder / name / "run"

    def note(self, name: str) -> None:
        self.result.checks[name] += 1

    def observed(self) -> list[str]:
        """The run, looked at from inside while it trains."""
        loaded = load(None, arguments({**self.settings, "output_dir": str(self.whole.parent)}))
        found: list[str] = []
        with quiet():
            if loaded.config.update.sft_steps:
                loaded = start_from_sft(loaded, run_training)
            with open_training(loaded) as (run, step, started_at):
                watch = Watch(run, self.note)
                for done in loop(run, step, started_at):
                    step = done.step
                    found += watch.step(done)
                finish(run, step, time.monotonic() - started_at)
                found += watch.end(step)
        return found


class Watch:
    """What must hold inside a run."""

    def __init__(self, run: TrainingRun, note: Callable[[str], None]) -> None:
        self.run, self.note = run, note
        self.frozen = {
            name: parameter.detach().clone()
            for name, parameter in run.policy.model.named_parameters()
            if not parameter.requires_grad
        }
        self.trained = [parameter.detach().clone() for parameter in run.policy.parameters()]
        self.experience: list[Any] = []
        prepare = run.updater.prepare

        def prepared(batches: Any) -> Any:
            self.experience = prepare(batches)
            return self.experience

        vars(run.updater)["prepare"] = prepared  # looked at, and passed on

    def step(self, done: Step) -> Iterator[str]:
        self.note("steps")
        for name, value in done.metrics.items():
            if not math.isfinite(value):
                yield f"step {done.step}: {name} is {value}"
        for name in ("clipped_ratio", "accuracy", "completions/clipped_ratio", "kept_ratio"):
            if not -1e-6 <= done.metrics.get(name, 0.0) <= 1 + 1e-6:
                yield f"step {done.step}: {name} is {done.metrics[name]}, no share"
        config = self.run.config
        if config.loss.is_supervised:
            return
        yield from self._logprobs(done)
        yield from self._rewards(done)
        yield from self._advantages(done)
        yield from self._seeds(done)

    def _logprobs(self, done: Step) -> Iterator[str]:
        rollout = self.run.config.rollout
        filtered = rollout.is_truncated or self.run.config.model.lora_dropout
        difference = done.metrics.get("sampling/sampling_logp_difference/mean")
        if difference is not None and not filtered and not rollout.async_rollouts:
            self.note("logprobs")
            if difference > 1e-4:
                yield f"step {done.step}: sampler and trainer differ by {difference}"

    def _rewards(self, done: Step) -> Iterator[str]:
        """The reward is the weighted sum of its parts, and scoring the text again gives the same."""
        tasks = self.run.config.tasks
        names = part_names(tasks.reward_funcs)
        weights = tasks.reward_weights or [1.0] * len(names)
        again = []
        for group in done.groups:
            for rollout in group.rollouts:
                score = rollout.score
                expected = sum(
                    weight * score.parts[name]
                    for name, weight in zip(names, weights, strict=True)
                    if name in score.parts
                )
                if score.failure is None and abs(expected - score.reward) > 1e-6:
                    yield f"{group.problem.id}: reward {score.reward}, its parts {dict(score.parts)}"
                if rollout.episode is not None and rollout.episode.error and score.reward > 0:
                    yield f"{group.problem.id}: a failed episode earns {score.reward}"
                if group.problem.environment is None and rollout.episode is None and score.failure is None:
                    again.append((group.problem, rollout))
        if self.run.config.environments.rollout_func or self.run.config.environments.agent or not again:
            return
        self.note("scored again")
        scorer = self.run.source._collector.scorer  # type: ignore[attr-defined]
        with scorer.probing():
            for problem, rollout in again:
                completion = rollout.completion
                scorer.submit(
                    ScoringRequest(
                        problem=problem,
                        text=rollout.text,
                        completion_ids=completion.token_ids,
                        truncated=completion.finish is Finish.LENGTH,
                    )
                )
            for (problem, rollout), score in zip(again, scorer.gather(), strict=True):
                if (score.reward, score.answer) != (rollout.score.reward, rollout.score.answer):
                    yield f"{problem.id}: {rollout.score.reward} at first, {score.reward} again"
        decode = self.run.source._collector.codec.decode  # type: ignore[attr-defined]
        for problem, rollout in again:
            if decode(rollout.completion.token_ids) != rollout.text:
                yield f"{problem.id}: the text is not that of its tokens"

    def _advantages(self, done: Step) -> Iterator[str]:
        """Plain arithmetic over the rewards, beside what the update was given."""
        config = self.run.config
        loss = config.loss
        if loss.advantage == "gae" or config.environments.turn_credit == "turn":
            return
        if loss.kl_in == "reward" and loss.beta > 0:
            return
        self.note("advantages")
        groups = [[rollout.score.reward for rollout in group.rollouts] for group in done.groups]
        every = [reward for group in groups for reward in group]
        expected = []
        for group in groups:
            mean, size = statistics.fmean(group), len(group)
            for reward in group:
                value = reward - mean
                if loss.advantage == "rloo":
                    value = reward - (sum(group) - reward) / (size - 1)
                if loss.advantage == "reinforce_pp":
                    value = (reward - statistics.fmean(every)) / (_deviation(every) + 1e-4)
                elif loss.scale_rewards == "group":
                    value /= _deviation(group) + 1e-4
                elif loss.scale_rewards == "batch":
                    value /= _deviation(every) + 1e-4
                expected.append(value)
        for minibatch in self.experience:
            for part in minibatch:
                given = part.advantages.tolist()
                ids = part.batch.batch_index[part.batch.sequence_ids].tolist()
                for index, advantage in zip(ids, given, strict=True):
                    if abs(expected[index] - advantage) > 1e-3 * max(1.0, abs(expected[index])):
                        yield f"completion {index}: advantage {advantage}, by hand {expected[index]}"
                        return

    def _seeds(self, done: Step) -> Iterator[str]:
        """Two groups of one batch never have the same samples unless there is only one way to go on."""
        config = self.run.config
        if config.rollout.temperature < 1 or config.rollout.top_k == 1 or config.rollout.top_p < 1:
            return
        if config.rollout.min_p or config.environments.rollout_func or config.environments.agent:
            return
        seen: dict[tuple[Any, ...], str] = {}
        for group in done.groups:
            key = tuple(rollout.completion.token_ids for rollout in group.rollouts)
            if len(key) > 1 and sum(map(len, key)) >= 16:
                if seen.get(key) == group.problem.question:
                    yield f"{group.problem.id}: the same completions twice in a batch"
                seen[key] = group.problem.question

    def end(self, step: int) -> Iterator[str]:
        run = self.run
        policy = run.policy
        now = dict(policy.model.named_parameters())
        for name, before in self.frozen.items():
            if not torch.equal(before, now[name]):
                yield f"the frozen weight {name} changed"
        update = run.config.update
        if update.learning_rate == 0 and not run.config.loss.is_supervised:
            self.note("rate 0")
            for before, after in zip(self.trained, policy.parameters(), strict=True):
                if not torch.equal(before, after) and update.weight_decay == 0:
                    yield "learning_rate is 0, and a weight moved"
                    break
        if run.config.run.load_best_model_at_end:
            return
        self.note("final model")
        final = run.folder / "final_model"
        other = load_policy(ModelConfig(model_name_or_path=str(final)), None, torch.device("cpu"))
        if run.config.model.load_in_4bit:
            return
        if not policy.is_lora:
            names = set(policy.lm.state_dict()) ^ set(other.lm.state_dict())
            if names:
                yield f"final_model and policy differ in {sorted(names)[:3]}"
            for name, value in other.lm.state_dict().items():
                if not torch.equal(value, policy.lm.state_dict()[name].to(value.dtype)):
                    yield f"final_model differs in {name}"
                    return
        difference = (_logits(policy) - _logits(other)).abs().max().item()
        if difference > 1e-3:
            yield f"logits of final_model differ by {difference}"
        if num_parameters(other.lm) < num_parameters(policy.lm) * 0.5:
            yield "final_model has fewer parameters"


def _logits(policy: Policy) -> torch.Tensor:
    policy.modes.train(False)
    policy.set_attention("sdpa")
    try:
        with torch.no_grad():
            return policy.model(PROBE).logits.float()
    finally:
        policy.restore_attention()


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def repeated(trial: Trial) -> Iterator[str]:
    """The same configuration again, bit for bit. Requests of agents come when they come: their batches, and
    with them the last bits, differ; what they sample does not.
    """
    trial.note("repeated")
    other = trial.train("repeated")
    if not trial.settings.get("agent"):
        yield from differences(trial.whole, other)
    elif _texts(trial.whole) != _texts(other):
        yield "the first completions of the agent differ"


def resumed(trial: Trial) -> Iterator[str]:
    """Cut after its first checkpoint, and resumed where it was, bit for bit."""
    checkpoints = sorted(int(p.name.split("-")[1]) for p in trial.whole.glob("checkpoint-*"))
    settings = trial.settings
    if settings.get("save_total_limit") or settings.get("agent") or len(checkpoints) < 2:
        return
    trial.note("resumed")
    cut, trial.whole = trial.whole, trial.folder / "kept" / "run"
    shutil.copytree(cut.parent, trial.whole.parent)
    shutil.rmtree(cut / "final_model")
    for lost in checkpoints[1:]:
        shutil.rmtree(cut / f"checkpoint-{lost}")
    for path in cut.glob("eval_results/eval_step_*.json"):
        if int(path.stem.split("_")[-1]) > checkpoints[0]:
            path.unlink()
    trial.train(cut.parent.name, auto_resume=True)
    yield from differences(trial.whole, cut)


def micro_batches(trial: Trial) -> Iterator[str]:
    """Other micro-batches, the same first gradient; later steps follow from it."""
    size = 48 if trial.settings.get("micro_batch_tokens") != 48 else 8192
    if trial.settings.get("agent") or (trial.settings.get("lora_dropout") and trial.settings.get("use_peft")):
        return  # other last bits; another pass, another mask
    trial.note("micro-batches")
    other = trial.train("micro", micro_batch_tokens=size)
    first, second = _train_rows(trial.whole)[0], _train_rows(other)[0]
    for name in ("loss", "grad_norm", "kl", "entropy", "reward", "value_loss"):
        a, b = first.get(name), second.get(name)
        if a is not None and b is not None and abs(a - b) > 1e-4 * max(1.0, abs(a)):
            yield f"{name} of the first step is {a}, with micro-batches of {size} tokens {b}"


def ineffective(trial: Trial) -> Iterator[str]:
    """Keys that the run names as without effect can be left out, bit for bit."""
    config = load(None, arguments(trial.settings)).config
    plan = make_plan(config, num_problems=config.tasks.dataset_size)
    named = set(without_effect(config, plan)) & set(trial.settings)
    if not named or trial.settings.get("agent"):
        return
    trial.note("keys without effect")
    kept = {key: value for key, value in trial.settings.items() if key not in named}
    trial.settings, before = kept, trial.settings
    try:
        other = trial.train("without")
    finally:
        trial.settings = before
    for file in sorted((trial.whole / "final_model").glob("*.safetensors")):
        one, two = load_file(file), load_file(other / "final_model" / file.name)
        if one.keys() != two.keys() or any(not torch.equal(one[name], two[name]) for name in one):
            yield f"{sorted(named)} are said to have no effect, and the weights differ without them"
            return


def _train_rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "train"]


def _texts(run: Path) -> list[str]:
    first = min(run.glob("completions/step_*.jsonl"), key=lambda path: int(path.stem.split("_")[1]))
    return [json.loads(line)["completion"] for line in first.read_text(encoding="utf-8").splitlines()]


CHECKS: dict[str, Check] = {
    "repeated": repeated,
    "resumed": resumed,
    "micro-batches": micro_batches,
    "without effect": ineffective,
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing on the terminal."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def run_seed(task: tuple[int, str]) -> Result:
    """A seed with all checks; its folder stays where something broke."""
    seed, folder = task
    own = Path(folder) / f"trial-{seed}"
    result = Trial(seed, own, Path(folder) / "files").run(list(CHECKS))
    if not result.violations:
        shutil.rmtree(own, ignore_errors=True)
    return result


def some_checks(seed: int, number: int) -> list[str]:
    """Which checks a seed gets where not all of them are made."""
    return random.Random(f"checks {seed}").sample(list(CHECKS), number)


def describe(result: Result) -> str:
    return "\n".join(
        [f"seed {result.seed}: {text}" for text in result.violations]
        + [f"  settings: {json.dumps(result.settings)}"]
    )
