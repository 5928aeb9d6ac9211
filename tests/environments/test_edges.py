"""Text, seeds and answers at the edges of environments: one door cleans, everything behind it can hold it."""

import json
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.environments import edges
from tests.support.waiting import wait_until
from whetstone.config import build
from whetstone.config.environments import EnvironmentsConfig
from whetstone.engines.base import SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.environments.adapter import open_episode, open_problem
from whetstone.environments.calls import executed_calls, parse_calls
from whetstone.environments.pool import Answer, EpisodePool
from whetstone.environments.toolbox import TOOLBOX, tool_schemas
from whetstone.errors import UserError
from whetstone.files import json_safe
from whetstone.model.chat import Chat
from whetstone.model.policy import load_policy
from whetstone.rollout.collector import Collector, EpisodeSettings
from whetstone.rollout.episodes import EpisodeStream, _judgement, _Running
from whetstone.tasks.registry import make_task
from whetstone.tasks.scoring.pool import Scorer
from whetstone.types import Problem, count_occurrences

FILE = Path(edges.__file__)
CALL = '<tool_call>{"name": "add", "arguments": {"number": 7}}</tool_call>'
THOUGHT = '<tool_call>{"name": "a", "arguments": {"x": "TAG"}}</tool_call>'
ADD = {"name": "add", "arguments": {"number": 7}}


def one_answer(pool: EpisodePool) -> Answer:
    return wait_until(lambda: pool.poll(1.0))[0]


@pytest.fixture(scope="module")
def pool():
    specs = [f"{FILE}:{name}" for name in ("Draws", "Says", "Waits", "Large", "Exits")]
    tools = [f"{FILE}:draws"]
    with EpisodePool(
        [*specs, TOOLBOX], timeout_s=2.0, memory_mb=2048, tools=tools, with_state=True
    ) as episodes:
        yield episodes


@pytest.fixture(scope="module")
def policy():
    return load_policy(build({"model_name_or_path": "pebble"}).model, None, torch.device("cpu"))


def begin(pool: EpisodePool, name: str, seed: int = 5, **settings) -> Answer:
    pool.start(1, f"{FILE}:{name}", settings, seed, {})
    return one_answer(pool)


def texts(answer: Answer) -> list[str]:
    return [message["content"] for message in answer.observation]


def test_half_a_character_passes_no_door(policy, pool):
    half = '"\\ud83d"'
    calls = parse_calls(f'<tool_call>{{"name": {half}, "arguments": {{{half}: [{half}]}}}}</tool_call>')
    assert calls == [{"name": "?", "arguments": {"?": ["?"]}}]
    assert texts(begin(pool, "Says")) == ["say ?"]
    assert open_problem(open_episode(edges.Says, {}), 5, {}) == ("say ?", [])
    pool.step(1, "on")
    answer = one_answer(pool)
    assert answer.observation == ({"role": "user", "content": "?"},)
    assert (answer.reward, answer.correct) == (0.1, True)
    pool.step(1, "raise")
    assert (one_answer(pool).error or "").startswith("ValueError: ? (edges.py, line ")
    chat = Chat(policy.tokenizer, build({"model_name_or_path": "pebble"}).model)
    assert chat.encode_observation(answer.observation, 100)
    row = json_safe(
        {"completion": edges.HALF, edges.HALF: float("nan"), "nested": json.loads("[" * 900 + "]" * 900)}
    )
    assert (row["completion"], row["?"]) == ("?", None)
    assert json.dumps(row["nested"], ensure_ascii=False).count("[") == 99
    json.dumps(row, ensure_ascii=False).encode()


def test_arguments_that_are_nested_too_deep_are_an_error():
    for depth, is_error in ((60, False), (64, True), (900, True)):
        nested = "[" * depth + "]" * depth
        [call] = parse_calls(f'<tool_call>{{"name": "a", "arguments": {{"x": {nested}}}}}</tool_call>')
        assert ("error" in call) == is_error, depth


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<think>Maybe {CALL} no.</think>The answer is 3.", []),
        (f"Maybe {CALL} no.</think>The answer is 3.", []),  # the prompt has opened the thought
        (f"<think>I might write <tool_call> here.</think>{CALL}", [ADD]),
        (f"<think>{CALL}", []),
        (f"[THINK]{CALL}[/THINK]3", []),
        (f"<think>a</think>b<think>{CALL}</think>c", []),
        (THOUGHT.replace("TAG", "<think>"), [{"name": "a", "arguments": {"x": "<think>"}}]),
        ("</think>" + THOUGHT.replace("TAG", "</think>"), [{"name": "a", "arguments": {"x": "</think>"}}]),
        (
            "<|channel|>analysis<|message|>I use to=functions.add now<|end|><|start|>assistant"
            "<|channel|>final<|message|>3<|return|>",
            [],
        ),
        (
            "<|channel|>analysis<|message|>to=functions.sub <think>?<|end|><|start|>assistant<|channel|>"
            'commentary to=functions.add <|constrain|>json<|message|>{"number": 7}<|call|>',
            [ADD],
        ),
        ('[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"number": 7}</s>', [ADD]),
        ('{"name": "Bob", "age": 3}', []),
    ],
)  # fmt: skip
def test_calls_in_thoughts_and_mentions_are_not_executed(text, calls):
    assert parse_calls(text) == calls


def test_what_is_left_out_of_many_calls_is_said():
    calls = executed_calls(parse_calls(CALL * 40))
    assert calls[:32] == [ADD] * 32
    assert calls[32:] == [{"error": "8 more calls were not executed: write at most 32 in one turn"}]


def test_global_generators_are_seeded_for_each_episode(pool):
    """numpy and torch of a fork would draw the same for ever, random something else each time."""
    first, again, other = (texts(begin(pool, "Draws", seed))[0].split() for seed in (5, 5, 6))
    assert first == again and not set(first) & set(other)
    state = torch.get_rng_state()
    episode = open_episode(edges.Draws, {})
    assert open_problem(episode, 5, {})[0].split() == first  # the prompt is what the episode says
    assert torch.equal(state, torch.get_rng_state())
    drawn = []
    for seed in (1, 1, 2):
        pool.start(1, TOOLBOX, {}, seed, {})
        one_answer(pool)
        pool.step(1, "", [{"name": "draws", "arguments": {}}])
        drawn.append(texts(one_answer(pool))[0])
    assert drawn[0] == drawn[1] != drawn[2]


def test_tools_draw_anew_for_a_problem_that_stands_twice(pool):
    problem = Problem(id="a/0", task="a", messages=(), answer=None, environment=TOOLBOX)
    codec, config = cast(Any, None), EnvironmentsConfig()
    stream = EpisodeStream(
        count_occurrences([problem, problem]), [(1,), (1,)], num_samples=1, seed_parts=(1,),
        sampling=SamplingParams(max_tokens=8), pool=pool, codec=codec, config=config,
        max_length=None, is_cancelled=lambda: False,
    )  # fmt: skip
    drawn = []
    for number in (0, 1):
        stream._start(number)
        one_answer(pool)
        pool.step(number, "", [{"name": "draws", "arguments": {}}])
        drawn.append(texts(one_answer(pool))[0])
    assert drawn[0] != drawn[1]


def test_everything_is_awaited_and_close_is_called(pool, tmp_path):
    assert texts(begin(pool, "Waits")) == ["begin"]
    pool.finish(1)
    answer = one_answer(pool)
    assert (answer.correct, answer.state) == (True, {"small": 3})  # numpy's bool; `big` is left out alone
    file = tmp_path / "closed"
    begin(pool, "Says", file=str(file))
    pool.finish(1)
    one_answer(pool)
    assert file.read_text() == "closed"


def test_rewards_that_sum_to_one_are_a_win():
    tenths = _Running(0, 0, (), rewards=[0.1] * 10, is_paid=True)
    assert _judgement(tenths) == {"reward": 1.0, "correct": True}
    assert not _judgement(_Running(0, 0, (), rewards=[0.999], is_paid=True))["correct"]
    assert _judgement(_Running(0, 0, (), final_reward=0.7 + 0.2 + 0.1, is_paid=True))["correct"]


def test_a_large_answer_is_not_late_and_has_its_own_time(pool):
    """Nobody reads while an engine works in rounds: its process waits in the middle of the answer."""
    begin(pool, "Large")
    pool.step(1, "on")
    time.sleep(2.5)  # longer than `timeout_s`
    answer = one_answer(pool)
    assert answer.error is None and len(texts(answer)[0]) == 900_000
    assert 0.04 < answer.seconds < 2


def test_the_middle_of_an_observation_is_cut_with_a_mark(policy):
    chat = Chat(policy.tokenizer, build({"model_name_or_path": "pebble"}).model)
    for size in (40, 41, 100):
        ids = chat.encode_observation([{"role": "user", "content": "A" * 300 + "B" * 300}], size)
        text = chat.decode(ids, keep_special=True)
        assert len(ids) == size and "A ... B" in text, text


def test_environments_in_trls_shape_get_the_tools_of_the_run(caplog):
    settings = EpisodeSettings(
        pool=None,  # type: ignore[arg-type]
        config=EnvironmentsConfig(),
        tools=tool_schemas([f"{FILE}:draws"]),
    )
    assert "The tool draws has no docstring" in caplog.text
    problem = Problem(
        id="p", task="t", messages=({"role": "user", "content": "?"},), answer={}, environment="e"
    )
    assert settings.add_tools(problem).tools == ()  # Gymnasium's shape
    trl = Problem(**{**vars(problem), "takes_calls": True})
    assert [tool["function"]["name"] for tool in settings.add_tools(trl).tools] == ["draws"]
    with pytest.raises(UserError, match="both have a tool draws"):
        settings.add_tools(settings.add_tools(trl))


def test_failed_episodes_earn_nothing_from_any_function(policy):
    names = [f"{FILE}:Exits", f"{FILE}:Large"]
    config = build(
        {
            "model_name_or_path": "pebble",
            "eval_num_samples": 0,
            "reward_workers": 1,
            "reward_funcs": ["accuracy", f"{FILE}:always"],
            "datasets": {name: {} for name in names},
        }
    )
    tasks = [make_task(config, name, config.tasks.datasets[name], "train") for name in names]
    with Scorer(config) as scorer, EpisodePool(names, timeout_s=20.0, memory_mb=2048) as episodes:
        collector = Collector(
            NativeEngine(policy, 4),
            scorer,
            Chat(policy.tokenizer, config.model),
            max_prompt_length=None,
            max_length=policy.max_length,
            episodes=EpisodeSettings(pool=episodes, config=EnvironmentsConfig(max_turns=1)),
        )
        failed, paid = collector.collect(
            [task.problem(0) for task in tasks],
            num_samples=2,
            sampling=SamplingParams(max_tokens=200, temperature=1.0),
            seed_parts=(1, "test"),
        )
    for rollout in failed.rollouts:
        assert rollout.episode is not None and rollout.episode.error == "its process has ended"
        assert (rollout.score.reward, dict(rollout.score.parts)) == (0.0, {"correct": 0.0})
    assert {rollout.score.parts["always"] for rollout in paid.rollouts} == {1.0}
