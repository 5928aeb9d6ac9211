"""Problems to scored groups: order, seeds, cut prompts, and the numbers of a step."""

from dataclasses import replace
from statistics import fmean

import pytest
import torch

from tests.conftest import make_policy
from tests.support.rollouts import Codec, batch_of
from whetstone.config import build, ineffective_settings, make_plan
from whetstone.config.sections import ModelConfig
from whetstone.engines.base import SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.errors import UserError
from whetstone.evaluation.evaluator import Evaluator
from whetstone.model.chat import Chat
from whetstone.rollout.collector import Collector, sampling_params
from whetstone.rollout.curriculum import Curriculum
from whetstone.rollout.learning_signal import has_signal
from whetstone.rollout.metrics import rollout_metrics, variance_metrics
from whetstone.rollout.source import RolloutSource
from whetstone.tasks.mixture import build_tasks
from whetstone.tasks.scoring.pool import Scorer
from whetstone.types import (
    Completion,
    Episode,
    Finish,
    Group,
    Problem,
    Rollout,
    Score,
    Turn,
    count_occurrences,
)


@pytest.fixture(scope="module")
def config():
    return build({"datasets": {"chain_sum": {}}, "reward_funcs": ["accuracy"], "eval_num_samples": 0})


@pytest.fixture(scope="module")
def scorer(config):
    with Scorer(config) as scorer:
        yield scorer


def collector(scorer, **limits):
    limits = {"max_prompt_length": None, "max_length": 128, **limits}
    return Collector(NativeEngine(make_policy(), 4), scorer, Codec(), **limits)


def collect(config, collector, step, max_tokens=8):
    problems = [build_tasks(config, "train").problem(i) for i in range(3)]
    return collector.collect(
        problems, num_samples=2, sampling=SamplingParams(max_tokens=max_tokens), seed_parts=(1, step)
    )


def test_groups_come_back_in_order_and_repeat_for_the_same_step(config, scorer):
    groups = collect(config, collector(scorer), step=5)
    tasks = build_tasks(config, "train")
    assert [group.problem for group in groups] == [tasks.problem(i) for i in range(3)]
    for group in groups:
        assert len(group.rollouts) == 2
        assert all(r.prompt_ids == Codec().encode(group.problem) for r in group.rollouts)
        assert all(r.text == Codec().decode(r.completion.token_ids) for r in group.rollouts)
    assert groups == collect(config, collector(scorer), step=5)
    assert groups != collect(config, collector(scorer), step=6)


def test_long_prompts_lose_their_beginning_and_are_counted(config, scorer):
    one = collector(scorer, max_prompt_length=7)
    groups = collect(config, one, step=0)
    assert groups[0].rollouts[0].prompt_ids == Codec().encode(groups[0].problem)[-7:]
    assert one.report.num_truncated_prompts == 3


def test_a_prompt_beyond_the_model_is_refused_by_name(config, scorer):
    with pytest.raises(UserError, match=r"prompt of chain_sum/train/\d+ has 20 tokens.*exceeds the 24"):
        collect(config, collector(scorer, max_length=24), step=0)


@pytest.mark.parametrize(
    ("error", "settings"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"), "max_num_seqs"),
        (RuntimeError("something else"), None),
    ],
)
def test_out_of_memory_in_the_engine_names_its_settings(config, scorer, monkeypatch, error, settings):
    one = collector(scorer)

    def fail(requests, sampling):
        raise error
        yield

    monkeypatch.setattr(one.engine, "generate", fail)
    with pytest.raises(UserError if settings else RuntimeError, match=settings or "something else") as caught:
        collect(config, one, step=0)
    assert "more" not in str(caught.value)


def test_dynamic_sampling_replaces_prompts_that_teach_nothing(tmp_path):
    rewards = tmp_path / "rewards.py"
    # half of the prompts pay every completion alike, the others by what was written
    rewards.write_text(
        "def uneven(prompts, completions, completion_ids, log_metric, **columns):\n"
        "    [log_metric('odd', ids[0] % 2) for ids in completion_ids]\n"
        "    pairs = zip(columns['id'], completion_ids)\n"
        "    return [0.0 if sum(map(ord, i)) % 2 else float(ids[0] % 2) for i, ids in pairs]\n"
    )
    config = build(
        {
            "datasets": {"chain_sum": {}},
            "reward_funcs": [f"{rewards}:uneven"],
            "eval_num_samples": 0,
            "apply_chat_template": False,
            "prompts_per_step": 6,
            "num_generations": 4,
            "max_steps": 3,
            "max_completion_length": 4,
            "dynamic_sampling": True,
            "dynamic_sampling_max_rounds": 8,
        }
    )
    plain = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"dynamic_sampling": False})}
    )
    with Scorer(config) as scorer:
        tasks, plan = build_tasks(config, "train"), make_plan(config, num_problems=1000)
        without = batch_of(RolloutSource(collector(scorer), tasks, plain, plan)).groups
        source = RolloutSource(collector(scorer), tasks, config, plan)
        rollouts = batch_of(source)
        groups = rollouts.groups
        flat = [n for n, group in enumerate(without) if not group.rewards_differ()]
        assert flat and rollouts.metrics["dynamic_sampling/resample_ratio"] >= len(flat) / 6
        assert all(group.rewards_differ() for group in groups)
        assert all(groups[n] == without[n] for n in range(6) if n not in flat)  # the others are left alone
        own = {tasks.problem(i).id for i in range(18)}
        assert all(groups[n].problem.id not in own for n in flat)  # fresh problems, of no other batch
        assert [tasks.problem(i) for i in rollouts.indices] == [group.problem for group in groups]
        assert batch_of(source).groups == groups  # a function of the step
        # Of every completion that was sampled, replaced ones included: (24 + 4 for each replaced prompt).
        sampled = 24 + 4 * round(6 * rollouts.metrics["dynamic_sampling/resample_ratio"])
        odd = [r.completion.token_ids[0] % 2 for group in without for r in group.rollouts]
        assert batch_of(RolloutSource(collector(scorer), tasks, plain, plan)).own_metrics == {
            "odd": fmean(odd)
        }
        assert rollouts.own_metrics["odd"] * sampled == pytest.approx(
            round(rollouts.own_metrics["odd"] * sampled)
        )
        assert rollouts.own_metrics["odd"] != fmean(odd)


def rollout(reward, answer, correct, length, finish=Finish.STOP, failure=None):
    completion = Completion(
        token_ids=(5,) * length, logprobs=(0.0,) * length, finish=finish, policy_version=0
    )
    score = Score(reward=reward, parts={"correct": correct, "format": 0.5}, answer=answer, failure=failure)
    return Rollout(prompt_ids=(1,), turns=(Turn(completion=completion),), text="", score=score)


def group(task, *rollouts):
    problem = Problem(
        id=f"{task}/train/000000", task=task, messages=({"role": "user", "content": "?"},), answer=""
    )
    return Group(problem=problem, rollouts=rollouts)


def test_numbers_of_a_step_by_hand():
    groups = [
        group("a", rollout(1.0, "4", 1.0, 2), rollout(0.0, "5", 0.0, 4)),
        group("b", rollout(0.0, "5", 0.0, 6, Finish.LENGTH), rollout(0.0, "6", 0.0, 8, failure="timeout")),
    ]
    row = rollout_metrics(groups)
    assert row["reward"] == 0.25 and row["reward_std"] == pytest.approx((3 / 16) ** 0.5)
    assert row["accuracy"] == 0.25 and row["accuracy/a"] == 0.5 and row["accuracy/b"] == 0.0
    assert row["completions/mean_length"] == 5.0 and row["completions/max_length"] == 8.0
    assert (
        row["completions/clipped_ratio"] == 0.25
        and row["scoring_failures"] == 1.0
        and row["rewards/format/mean"] == 0.5
    )
    assert variance_metrics(groups) == {"frac_reward_zero_std": 0.5, "frac_answers_identical": 0.0}
    # A critic's baseline is no group, and a completion alone is compared with nothing.
    assert variance_metrics(groups, "gae") == {"frac_answers_identical": 0.0}
    assert variance_metrics([group("a", rollout(1.0, "4", 1.0, 2))], "gae") == {}


def test_base_models_get_the_template_and_the_prefix():
    class Bare:
        chat_template, all_special_ids = None, ()

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [1, *map(ord, text)] if add_special_tokens else list(map(ord, text))}

    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is {x}?"})
    problem = Problem(id="p", task="t", messages=messages, answer="")
    room = ModelConfig(
        apply_chat_template=False, prompt_template="{system} Q: {question} A:", assistant_prefix=" <think>"
    )
    chat = Chat(Bare(), room)
    assert chat.prompt(problem) == "Be brief. Q: What is {x}? A: <think>"
    assert chat.encode(problem)[:2] == (1, ord("B"))
    with pytest.raises(UserError, match="apply_chat_template=false"):
        Chat(Bare(), ModelConfig())


def rows_config(tmp_path, rows, **changes):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "{q}", "answer": "7"}}\n' for q in rows))
    settings = {
        "datasets": {"math": {"config": {"path": str(tmp_path / "rows.jsonl")}}}, "eval_num_samples": 0,
        "apply_chat_template": False, "prompts_per_step": 6, "num_generations": 4, "max_steps": 2,
        "max_completion_length": 8, "reward_workers": 1,
    }  # fmt: skip
    return build({**settings, **changes})


def test_a_problem_that_stands_twice_is_sampled_anew(tmp_path):
    config = rows_config(tmp_path, ["one?", "two?", "three?"])
    with Scorer(config) as scorer:
        tasks = build_tasks(config, "train")
        source = RolloutSource(collector(scorer), tasks, config, make_plan(config, num_problems=3))
        groups, probed = batch_of(source).groups, source.probe(0, 6)
        evaluated = Evaluator(config, [tasks.problem(i) for i in range(6)], source._collector, tmp_path)
        records = evaluated._sample_records("evaluation", 1.0, 1)
    for batch in (groups, probed):
        assert sorted(group.problem.occurrence for group in batch) == [0, 0, 0, 1, 1, 1]
        said = [rollout.completion.token_ids for group in batch for rollout in group.rollouts]
        assert len(said) == len(set(said)) == 24  # 12 were the other 12 again
    assert len({record.completion for record in records}) == 6
    # The first of each has the seeds that it would have alone.
    alone = Problem(id="a/0", task="a", messages=(), answer=None)
    assert [p.seed_parts for p in count_occurrences([alone, alone, alone])] == [
        ("a/0",),
        ("a/0", "occurrence", 1),
        ("a/0", "occurrence", 2),
    ]


def test_only_groups_without_a_gradient_are_replaced(tmp_path):
    flat = {
        "dynamic_sampling": True,
        "num_generations": 1,
        "prompts_per_step": 2,
        "advantage": "reinforce_pp",
    }
    config = rows_config(tmp_path, ["one?", "two?", "three?"], **flat)
    plan = make_plan(config, num_problems=3)
    with Scorer(config) as scorer:
        source = RolloutSource(collector(scorer), build_tasks(config, "train"), config, plan)
        assert batch_of(source).metrics["dynamic_sampling/resample_ratio"] == 0  # it was 3
    assert any("dynamic_sampling (with advantage" in note for note in ineffective_settings(config, plan))
    by_turn = build({"datasets": {"chain_sum": {}}, "turn_credit": "turn"})
    turn = rollout(1.0, "7", 1.0, 2).turns[0]

    def episode(*earned):
        row = Episode(finish=Finish.STOP, messages=(), rewards=earned)
        return replace(rollout(1.0, "7", 1.0, 2), turns=(turn, turn), episode=row)

    early_and_late = group("a", episode(1.0, 0.0), episode(0.0, 1.0))
    assert has_signal(early_and_late, by_turn) and not early_and_late.rewards_differ()
    assert not has_signal(early_and_late, build({"datasets": {"chain_sum": {}}}))


class Recorded(Curriculum):
    def observe(self, groups):
        self.groups = list(groups)
        super().observe(self.groups)


def test_the_curriculum_sees_groups_that_are_replaced(tmp_path):
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def odd(completion_ids, **_):\n    return [float(ids[0] % 2) for ids in completion_ids]\n"
    )
    config = build(
        {
            "datasets": {"chain_sum": {"curriculum": {"start": 1, "top": 3, "window": 1000}}},
            "reward_funcs": [f"{rewards}:odd"], "eval_num_samples": 0, "apply_chat_template": False,
            "prompts_per_step": 6, "num_generations": 2, "max_steps": 2, "max_completion_length": 4,
            "dynamic_sampling": True, "reward_workers": 1,
        }
    )  # fmt: skip
    with Scorer(config) as scorer:
        tasks, plan = build_tasks(config, "train"), make_plan(config, num_problems=1000)
        source = RolloutSource(collector(scorer), tasks, config, plan)
        source._curriculum = curriculum = Recorded(tasks.curricula)
        groups = batch_of(source, 0).groups
        problems = [tasks.problem(index, {"chain_sum": 1}) for index in range(6)]
        first = source._collector.collect(
            problems,
            num_samples=2,
            sampling=sampling_params(config, config.rollout.temperature),
            seed_parts=(config.run.seed, "rollout", 0),
        )
    assert (
        curriculum.groups == first != groups
        and len(source.state()["curriculum"]["chain_sum"]["answers"]) == 12
    )


def test_an_accuracy_that_nothing_was_scored_for_is_left_out():
    failed = replace(
        rollout(0.0, None, 0.0, 3), score=Score(reward=0.0, parts={}, answer=None, failure="timeout")
    )
    row = rollout_metrics([group("rows", failed, failed), group("sums", rollout(1.0, "7", 1.0, 3))])
    assert row["accuracy"] == row["accuracy/sums"] == 1.0 and "accuracy/rows" not in row
