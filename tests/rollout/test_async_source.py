"""One batch ahead: the same samples as a schedule written out by hand, real overlap, weights that are pushed
when they should be, and what happens when something fails.
"""

import io
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conftest import make_policy
from tests.support.rollouts import Codec, batch_of
from whetstone.config import build, ineffective_settings, make_plan
from whetstone.config.sections import ModelConfig
from whetstone.engines import make_engine
from whetstone.engines.base import SyncedCopyEngine
from whetstone.engines.native import NativeEngine
from whetstone.errors import UserError
from whetstone.model.lora import add_lora
from whetstone.model.policy import Policy
from whetstone.model.sharded import sampling_copy
from whetstone.rollout.async_source import AsyncRolloutSource, from_plain, to_plain
from whetstone.rollout.collector import Collector
from whetstone.rollout.source import RolloutSource
from whetstone.tasks.mixture import build_tasks
from whetstone.tasks.scoring.pool import Scorer
from whetstone.update.packing import pack_minibatches
from whetstone.update.updater import Updater

FLAT: dict[str, Any] = {
    "datasets": {"chain_sum": {}},
    "apply_chat_template": False,
    "eval_num_samples": 0,
    "prompts_per_step": 2,
    "num_generations": 4,
    "max_steps": 8,
    "num_iterations": 2,
    "max_completion_length": 8,
    "learning_rate": 1e-2,
    "reward_workers": 1,
}


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(
        "def even(prompts, completions, completion_ids, **columns):\n"
        "    return [float(ids[0] % 2) + sum(ids) % 5 / 10 for ids in completion_ids]\n"
    )
    return f"{path}:even"


@pytest.fixture(scope="module")
def scorer(rewards):
    with Scorer(build({**FLAT, "reward_funcs": [rewards]})) as scorer:
        yield scorer


def collector_on(engine, scorer):
    return Collector(engine, scorer, Codec(), max_prompt_length=None, max_length=128)


def parts(rewards, scorer, policy=None, kind=AsyncRolloutSource, **changes):
    """(config, plan, policy, source, updater) of a tiny run."""
    config = build({**FLAT, "reward_funcs": [rewards], "async_rollouts": 1, **changes})
    plan = make_plan(config, num_problems=1000)
    policy = policy or make_policy()
    updater = Updater(policy, config, plan, None)
    collector = collector_on(make_engine(config, policy), scorer)
    return config, plan, policy, kind(collector, build_tasks(config, "train"), config, plan), updater


def learn(config, plan, updater, rollouts):
    minibatches = pack_minibatches(rollouts.groups, config, plan.minibatches, 0, max_tokens=8192)
    return updater.update(updater.prepare(minibatches), seed=0)


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_samples_equal_the_schedule_written_by_hand(rewards, scorer, engine):
    config, plan, policy, source, updater = parts(rewards, scorer, rollout_engine=engine)
    rounds = []
    for step in range(0, plan.num_steps, plan.updates_per_batch):
        rounds.append(batch_of(source, step))
        learn(config, plan, updater, rounds[-1])
    source.close()
    assert [rollouts.metrics["staleness"] for rollouts in rounds] == [0.0, 1.0, 1.0, 1.0]

    # By hand: batches 0 and 1 are sampled by the first weights, batch t by those after t - 1 updates.
    config, plan, other, _, updater = parts(rewards, scorer, rollout_engine=engine)
    weights = [other.copy()]
    for t, rollouts in enumerate(rounds):
        sampled_by = weights[max(0, t - 1)]
        plain = build({**FLAT, "reward_funcs": [rewards], "rollout_engine": engine})
        alone = RolloutSource(
            collector_on(make_engine(plain, sampled_by), scorer), build_tasks(plain, "train"), plain, plan
        )
        by_hand = alone.sample(t * plan.updates_per_batch)
        assert tokens(by_hand) == tokens(rollouts), t
        learn(config, plan, updater, by_hand)
        weights.append(other.copy())
    assert tokens(rounds[0]) != tokens(rounds[1])
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), other.parameters(), strict=True))


def tokens(rollouts):
    return [[(r.completion.token_ids, r.completion.logprobs) for r in g.rollouts] for g in rollouts.groups]


class Watched(NativeEngine):
    """Slow enough to be seen, and keeps the times."""

    def __init__(self, *args):
        super().__init__(*args)
        self.times: list[tuple[float, float]] = []

    def generate(self, requests, sampling):
        begun = time.monotonic()
        time.sleep(0.3)
        yield from super().generate(requests, sampling)
        self.times.append((begun, time.monotonic()))


def watched_parts(rewards, scorer, engine_type=Watched):
    config, plan, policy, _, updater = parts(rewards, scorer)
    own, refresh = sampling_copy(policy)
    engine = engine_type(own, 8)
    collector = collector_on(SyncedCopyEngine(engine, refresh), scorer)
    return (
        config,
        plan,
        engine,
        AsyncRolloutSource(collector, build_tasks(config, "train"), config, plan),
        updater,
    )


def test_the_next_batch_is_sampled_during_the_update(rewards, scorer):
    config, plan, engine, source, updater = watched_parts(rewards, scorer)
    updates = []
    for step in range(0, plan.num_steps, plan.updates_per_batch):
        rollouts = batch_of(source, step)
        begun = time.monotonic()
        learn(config, plan, updater, rollouts)
        updates.append((begun, time.monotonic()))
    source.close()
    assert len(engine.times) == 4
    for t in range(3):  # batch t + 1 and the update on batch t
        begun, ended = engine.times[t + 1]
        assert begun < updates[t][1] and updates[t][0] < ended, t
        assert ended <= updates[t + 1][0]  # and it is whole before anybody learns from it


def test_the_policy_may_train_while_the_engine_keeps_its_weights():
    policy = make_policy()
    engine: Any = make_engine(build({**FLAT, "async_rollouts": 1}), policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1)
    assert not any(
        torch.equal(a, b)
        for a, b in zip(engine.engine.engine.policy.parameters(), policy.parameters(), strict=True)
        if a.dim() > 1
    )
    engine.update_weights(3)
    pairs = zip(
        engine.engine.engine.policy.model.state_dict().items(), policy.model.state_dict().items(), strict=True
    )
    assert all(mine == theirs and torch.equal(a, b) for (mine, a), (theirs, b) in pairs)
    assert engine.engine.engine.policy_version == 3
    assert not isinstance(
        make_engine(build(FLAT), policy), SyncedCopyEngine
    )  # without it there is no second copy


def test_with_lora_only_the_adapter_is_copied():
    plain = make_policy()
    policy = Policy(
        add_lora(plain.model, ModelConfig(use_peft=True, lora_r=2), None), plain.tokenizer, plain.device
    )
    own, refresh = sampling_copy(policy)
    pairs = list(zip(policy.model.parameters(), own.model.parameters(), strict=True))
    assert all((a is b) == (not a.requires_grad) for a, b in pairs)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    ids = torch.arange(3, 12)
    engine = SyncedCopyEngine(NativeEngine(own, 4), refresh)
    policy.set_attention("eager")
    own.set_attention("eager")
    with torch.no_grad():
        assert not torch.allclose(policy.lm(ids[None]).logits, own.lm(ids[None]).logits)
        engine.update_weights(1)
        assert torch.equal(policy.lm(ids[None]).logits, own.lm(ids[None]).logits)


def test_what_goes_wrong_in_the_thread_is_the_runs_error(rewards, scorer):
    class Broken(Watched):
        def generate(self, requests, sampling):
            if len(self.times) == 2:
                raise UserError("The engine is gone: restart it.")
            yield from super().generate(requests, sampling)

    _, _, _, source, _ = watched_parts(rewards, scorer, Broken)
    batch_of(source, 0)
    batch_of(source, 2)
    with pytest.raises(UserError, match="The engine is gone"):
        batch_of(source, 4)
    source.close()


def test_a_run_that_ends_does_not_wait_for_the_whole_batch(rewards, scorer):
    is_endless = threading.Event()

    class Endless(Watched):
        def generate(self, requests, sampling):
            one = list(super().generate(requests, sampling))
            if len(self.times) > 1:
                is_endless.set()
                while True:
                    time.sleep(0.01)
                    yield one[0]
            yield from one

    _, _, _, source, _ = watched_parts(rewards, scorer, Endless)
    batch_of(source, 0)
    assert is_endless.wait(60)
    begun = time.monotonic()
    source.close()
    assert time.monotonic() - begun < 30  # the batch itself has no end
    assert scorer.gather() == []  # what the cancelled batch had submitted is gone


def test_an_engine_that_never_gets_new_weights_is_found_out(rewards, scorer):
    class Stale(Watched):
        def update_weights(self, policy_version):
            return None

    _, _, _, source, _ = watched_parts(rewards, scorer, Stale)
    batch_of(source, 0)
    batch_of(source, 2)
    with pytest.raises(UserError, match=r"step 0 .*step 4"):
        batch_of(source, 4)
    source.close()


def test_the_batch_under_way_survives_a_checkpoint(rewards, scorer):
    _, _, _, source, _ = parts(rewards, scorer)
    batch_of(source, 0)
    file = io.BytesIO()
    torch.save(source.state(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)  # plain data only
    expected = batch_of(source, 2)
    _, _, _, resumed, _ = parts(rewards, scorer)
    resumed.load_state(state)
    again = batch_of(resumed, 2)
    assert again.groups == expected.groups and again.metrics == expected.metrics
    assert from_plain(to_plain(expected), source._tasks) == expected
    group = expected.groups[0]
    turn = group.rollouts[0].turns[0]
    turns = (replace(turn, observation_ids=(4,)), replace(turn, context_ids=(5, 6)))
    rollout = replace(group.rollouts[0], turns=turns)
    changed = replace(expected, groups=[replace(group, rollouts=(rollout,)), *expected.groups[1:]])
    assert from_plain(to_plain(changed), source._tasks) == changed
    source.close()
    resumed.close()


def test_old_samples_are_weighed_unless_somebody_chose():
    assert build({"async_rollouts": 1}).loss.importance_correction == "token_truncate"
    assert build({"async_rollouts": 1, "importance_correction": "none"}).loss.importance_correction == "none"
    assert build({}).loss.importance_correction == "none"
    with pytest.raises(UserError, match="async_rollouts"):
        build({"async_rollouts": 2})


def test_the_off_policy_mask_has_effect_on_old_samples():
    flat = {"off_policy_mask_threshold": 0.1, "max_steps": 4}
    for ahead, expected in ((0, 1), (1, 0)):
        config = build({**flat, "async_rollouts": ahead})
        assert len(ineffective_settings(config, make_plan(config, num_problems=10))) == expected
    config = build({"async_rollouts": 1, "max_steps": 1, "importance_correction": "none"})
    (note,) = ineffective_settings(config, make_plan(config, num_problems=10))
    assert "one batch" in note


def test_token_weight_is_the_policy_ratio_since_sampling(rewards, scorer):
    """Of a batch that is one step old: gradient = sum of min(p_now / p_sampled, 3) x A x d log p."""
    settings = {"num_iterations": 1, "loss_type": "reinforce", "scale_rewards": "none", "max_grad_norm": 0}
    config, plan, policy, source, updater = parts(rewards, scorer, **settings)
    learn(config, plan, updater, batch_of(source, 0))
    rollouts = batch_of(source, 1)
    source.close()
    loss, total = torch.zeros(()), 0
    policy.set_attention("eager")
    for group in rollouts.groups:
        mean = sum(r.score.reward for r in group.rollouts) / len(group.rollouts)
        for r in group.rollouts:
            ids = torch.tensor([*r.prompt_ids, *r.completion.token_ids])
            start = len(r.prompt_ids)
            logits = policy.lm(ids[None]).logits[0].log_softmax(-1)
            logprobs = logits[torch.arange(start - 1, len(ids) - 1), ids[start:]]
            weights = (logprobs.detach() - torch.tensor(r.completion.logprobs)).exp()
            assert (weights - 1).abs().max() > 1e-2  # the policy has moved since
            loss = loss - (weights.clamp(max=3) * (r.score.reward - mean) * logprobs).sum()
            total += len(logprobs)
    expected = torch.autograd.grad(loss / total, policy.parameters())
    policy.set_attention("whetstone")
    caught: list[Any] = []
    updater.optimizer.step = lambda norm: caught.extend(
        p.grad.clone() for p in policy.parameters() if p.grad is not None
    )
    learn(config, plan, updater, rollouts)
    for mine, theirs in zip(caught, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-4 * theirs.norm() + 1e-8
