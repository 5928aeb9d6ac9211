"""Episodes of the embedded model: exact tokens, right logprobs, repeatable whatever environments take."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.environments import bad, unseeded, waiting
from tests.support.conversations import all_ids, check_logprobs, check_tokens, rollouts_of
from whetstone.config import build
from whetstone.config.environments import EnvironmentsConfig
from whetstone.engines.base import SamplingParams
from whetstone.engines.hf import HFEngine
from whetstone.engines.native import NativeEngine
from whetstone.environments.pool import EpisodePool
from whetstone.model.chat import Chat
from whetstone.model.policy import Policy, load_policy
from whetstone.rollout.collector import Collector, EpisodeSettings
from whetstone.rollout.metrics import rollout_metrics
from whetstone.tasks.registry import environments_of, make_task
from whetstone.tasks.scoring.pool import Scorer
from whetstone.types import Finish, Group

SLOW = f"{Path(waiting.__file__)}:SlowGuess"
BAD = {
    kind: f"{Path(bad.__file__)}:{kind.__name__}" for kind in (bad.StepHangs, bad.ReturnsNone, bad.StepExits)
}
UNSEEDED = f"{Path(unseeded.__file__)}:Unseeded"
GAME = {"config": {"low": 1, "high": 9, "max_guesses": 3}}
CONFIG = build(
    {
        "model_name_or_path": "pebble",
        "eval_num_samples": 0,
        "reward_funcs": ["accuracy"],
        "datasets": {"guess_number": GAME, SLOW: GAME, UNSEEDED: {}, **{name: {} for name in BAD.values()}},
    }
)


class Setting(NamedTuple):
    policy: Policy
    scorer: Scorer
    pool: EpisodePool


@pytest.fixture(scope="module")
def setting():
    policy = load_policy(CONFIG.model, None, torch.device("cpu"))
    names = environments_of(CONFIG)
    with Scorer(CONFIG) as scorer, EpisodePool(names, timeout_s=20.0, memory_mb=512) as pool:
        yield Setting(policy, scorer, pool)


def collect(
    setting: Setting, name: str, engine=None, *, max_tokens=40, slots=8, temperature=1.0, **turns
) -> list[Group]:
    task = make_task(CONFIG, name, CONFIG.tasks.datasets[name], "train")
    collector = Collector(
        engine or NativeEngine(setting.policy, slots),
        setting.scorer,
        Chat(setting.policy.tokenizer, CONFIG.model),
        max_prompt_length=None,
        max_length=setting.policy.max_length,
        episodes=EpisodeSettings(pool=setting.pool, config=EnvironmentsConfig(**turns)),
    )
    return collector.collect(
        [task.problem(index) for index in range(4)],
        num_samples=4,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature),
        seed_parts=(1, "test"),
    )


def test_tokens_equal_conversation_and_logprobs_equal_trainer(setting):
    groups = collect(setting, "guess_number")
    turns = [len(rollout.turns) for rollout in rollouts_of(groups)]
    assert 3 in turns
    check_tokens(setting.policy, groups)
    check_logprobs(setting.policy, groups, CONFIG)
    for rollout in rollouts_of(groups):
        if rollout.completion.finish is not Finish.LENGTH:
            assert rollout.episode is not None
            wins = rollout.episode.rewards[-1] == 1.0
            assert rollout.score.reward == rollout.score.parts["correct"] == float(wins)
    metrics = rollout_metrics(groups)
    assert metrics["episodes/mean_turns"] == sum(turns) / len(turns)
    assert metrics["episodes/failed_ratio"] == 0


def test_rollouts_do_not_depend_on_slots_or_latency(setting):
    first, second = (collect(setting, SLOW, slots=slots) for slots in (16, 3))
    assert ids_of(first) == ids_of(second)


def test_full_determinism_is_bitwise_under_any_latency(setting):
    runs = [collect(setting, SLOW, full_determinism=True) for _ in range(3)]
    first, *others = ([rollout.turns for rollout in rollouts_of(groups)] for groups in runs)
    assert any(len(turns) > 2 for turns in first)
    assert all(other == first for other in others)  # logprobs included
    assert ids_of(runs[0]) == ids_of(collect(setting, SLOW))


def ids_of(groups: list[Group]) -> list[list[int]]:
    return [all_ids(rollout) for rollout in rollouts_of(groups)]


def test_an_engine_without_a_stream_works_in_rounds(setting):
    engines = (HFEngine(setting.policy, 16, None), NativeEngine(setting.policy, 8))
    greedy = [collect(setting, "guess_number", engine=engine, temperature=0.0) for engine in engines]
    ours, theirs = ([r.completion.token_ids for r in rollouts_of(groups)] for groups in greedy)
    assert ours == theirs
    assert max(map(len, ours)) <= 40  # of all turns: later ones have what the first left


def test_limits_end_an_episode_with_their_reason(setting):
    groups = collect(setting, "guess_number", max_turns=2)
    assert Finish.MAX_TURNS in {rollout.completion.finish for rollout in rollouts_of(groups)}
    shorter = rollouts_of(collect(setting, "guess_number", max_tokens=6))
    assert all(len(rollout.completion.token_ids) <= 6 for rollout in shorter)


@pytest.mark.parametrize("name", ["guess_number", SLOW])
def test_who_is_cut_off_before_the_first_step_has_earned_nothing(setting, name):
    """Also where the policy is cut off before its environment is ready."""
    for rollout in rollouts_of(collect(setting, name, max_tokens=1)):
        assert rollout.episode is not None and rollout.episode.finish is Finish.LENGTH
        assert (rollout.score.failure, rollout.score.reward) == (None, 0.0)


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_environment_ends_its_rollouts_and_is_named(setting, kind, monkeypatch):
    monkeypatch.setattr(setting.pool, "timeout_s", 1.0 if kind is bad.StepHangs else 20.0)
    groups = collect(setting, BAD[kind])
    expected = Finish.TIMEOUT if kind is bad.StepHangs else Finish.TOOL_ERROR
    for rollout in rollouts_of(groups):
        assert rollout.episode is not None and rollout.score.reward == 0.0
        if rollout.episode.finish is not Finish.LENGTH:
            assert bad.REASONS[kind] in (rollout.episode.error or "")
            assert rollout.episode.finish is expected
    assert rollout_metrics(groups)["episodes/failed_ratio"] > 0.5


def test_an_episode_that_begins_otherwise_than_its_prompt_fails(setting):
    groups = collect(setting, UNSEEDED)
    for rollout in rollouts_of(groups):
        assert rollout.episode is not None and "same seed" in (rollout.episode.error or "")
        assert rollout.completion.finish is Finish.TOOL_ERROR and rollout.score.reward == 0.0
