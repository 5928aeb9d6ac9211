"""Tools for ordinary tasks, TRL's keys, and programs that are repaired by their tests."""

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from tests.environments import wordle_env
from tests.environments.playing import call, play, playing
from tests.support.waiting import wait_until
from whetstone.config import build, load
from whetstone.environments.builtin_tools import ToolFailed, calculator
from whetstone.environments.games import GAMES
from whetstone.environments.pool import Answer, EpisodePool
from whetstone.environments.toolbox import TOOLBOX, block_arguments, tool_schemas
from whetstone.errors import UserError
from whetstone.tasks.registry import environments_of, make_task
from whetstone.types import Finish

FILE = Path(wordle_env.__file__)
SUMS = {
    "datasets": {"chain_sum": {"config": {"min_terms": 3, "max_terms": 4, "min_digits": 4, "max_digits": 6}}},
    "reward_funcs": ["accuracy"],
}


@pytest.fixture(scope="module")
def sums():
    with playing({**SUMS, "tools": ["calculator"]}) as session:
        yield session


def expression_in(text: str) -> str:
    return re.findall(r"[\d(][\d ()+\-*/.]*\d", text)[0]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(17 + 4) * 3.25", "68.25"),
        ("2/3", "0.666666666666667"),
        ("-7/8", "-0.875"),
        ("1/400", "0.0025"),
        ("12345678901234567890 * 10", "123456789012345678900"),
        ("3 \N{MULTIPLICATION SIGN} 4", "12"),
        ("0.1+0.2", "0.3"),
    ],
)
def test_the_calculator_is_exact(expression, value):
    assert calculator(expression) == value
    if "/3" not in expression:
        assert Fraction(value) == Fraction(calculator(f"({expression})*1"))


@pytest.mark.parametrize(
    "expression", ["", "1/0", "__import__('os')", "9**9**9", "(" * 500, "1" * 500, "2 3", "exit()", "1e999"]
)
def test_the_calculator_refuses_everything_else(expression):
    with pytest.raises(ToolFailed):
        calculator(expression)


def test_an_ordinary_task_is_scored_by_the_last_turn(sums):
    def script(turn: int, new: str) -> str:
        if turn == 0:
            assert '"name": "calculator"' in new  # described to the model
            question = new.split("</tool_call>")[-1]
            return "I calculate. " + call("calculator", expression=expression_in(question))
        [result] = re.findall("<tool_response>\n(.*)\n</tool_response>", new)
        return f"The result is <answer>{result}</answer>"

    for problem in (0, 1):
        rollout = play(sums, script, problem)
        assert rollout.score.reward == 1.0 and rollout.episode is not None
        assert rollout.text.startswith("The result is") and rollout.completion.finish is Finish.STOP
        assert (rollout.episode.num_tool_calls, rollout.episode.num_tool_errors) == (1, 0)
        assert [message["role"] for message in rollout.episode.messages] == ["assistant", "tool", "assistant"]


def test_a_block_of_code_calls_the_tool_of_that_name():
    """The tool is not described: the prompt is that of the task. A turn without a block ends the episode."""

    def script(turn: int, new: str) -> str:
        if turn == 0:
            assert "tool" not in new
            return f"I compute it.\n```python\nx = {expression_in(new)}\nx\n```"
        [result] = re.findall("<tool_response>\n(.*)\n</tool_response>", new)
        return f"<answer>{result}</answer>"

    with playing({**SUMS, "tools": ["python"], "tool_call_format": "code_block"}) as session:
        rollout = play(session, script, max_tool_calling_iterations=1)
        assert rollout.episode is not None and rollout.score.reward == 1.0
        assert (rollout.episode.num_tool_calls, rollout.episode.finish) == (1, Finish.STOP)
        again = play(session, lambda turn, new: "```python\n1\n```", max_tool_calling_iterations=1)
        assert again.episode is not None and again.episode.finish is Finish.MAX_TURNS


def test_a_tool_of_several_arguments_is_not_called_by_blocks():
    tool = {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}, "required": ["a", "b"]}}
    with pytest.raises(UserError, match="the tool add does not take one text: give it one argument"):
        block_arguments([{"type": "function", "function": tool}])
    tool["parameters"]["required"] = ["b"]
    assert block_arguments([{"type": "function", "function": tool}]) == {"add": "b"}


def test_a_malformed_call_goes_back_and_counts(sums):
    fenced = '```json\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n```'
    turns = ["<tool_call>calculator(1+1)</tool_call>", call("adder"), fenced, "<answer>0</answer>"]
    rollout = play(sums, lambda turn, new: turns[turn])
    assert rollout.episode is not None and rollout.score.reward < 0.1
    contents = [m["content"] for m in rollout.episode.messages if m["role"] == "tool"]
    assert contents == [
        "Error: the tool call is no JSON object.",
        "Error: there is no tool adder. There are: calculator.",
        "Error: the call of calculator is in a code fence: write the JSON object between <tool_call> and "
        "</tool_call>.",
    ]
    assert (rollout.episode.num_tool_calls, rollout.episode.num_tool_errors) == (3, 3)


def test_without_a_call_no_process_is_started(sums):
    rollout = play(sums, lambda turn, new: "<answer>0</answer>")
    assert rollout.episode is not None and len(rollout.turns) == 1
    assert rollout.episode.environment_s == 0.0 and rollout.episode.finish is Finish.STOP


@pytest.mark.parametrize(("limit", "num_turns", "num_calls"), [(0, 1, 0), (2, 3, 2), (None, 4, 3)])
def test_max_tool_calling_iterations_is_that_of_trl(sums, limit, num_turns, num_calls):
    limits = {"max_tool_calling_iterations": limit, "max_turns": 4}
    rollout = play(sums, lambda turn, new: call("calculator", expression="1+1"), **limits)
    assert rollout.episode is not None and rollout.episode.finish is Finish.MAX_TURNS
    assert (len(rollout.turns), rollout.episode.num_tool_calls) == (num_turns, num_calls)


def next_answer(pool: EpisodePool) -> Answer:
    return wait_until(lambda: pool.poll(1.0))[0]


@pytest.mark.parametrize("isolation", [None, "auto"], ids=["own", "shared"])
def test_python_tool_keeps_state_and_stays_in_the_sandbox(tmp_path, isolation):
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    settings = {"tools": ["python"], "sandbox_isolation": isolation}
    with EpisodePool([TOOLBOX], timeout_s=60.0, memory_mb=1024, **settings) as pool:
        cells = [
            ("x = 3\nprint('first')", "first"),
            ("def f(n): return n * x\nf(14)", "42"),
            ("x += 1; raise ValueError('late')", "ValueError: late"),
            ("x", "4"),
            ("print(open('" + str(secret) + "').read())", "Error"),
            ("import os; os._exit(0) if x == 4 else None", "(no output)"),
        ]
        for number in (0, 1):
            pool.start(number, TOOLBOX, {}, 0, {})
            next_answer(pool)
        for code, expected in cells[:-1]:
            pool.step(0, "", [{"name": "python", "arguments": {"code": code}}])
            answer = next_answer(pool)
            [message] = answer.observation
            assert expected in message["content"] and "the secret" not in message["content"]
            assert not message["content"].startswith("Error")
            assert answer.num_tool_errors == ("Error" in expected)
        pool.step(1, "", [{"name": "python", "arguments": {"code": "x"}}])
        [message] = next_answer(pool).observation
        assert "NameError" in message["content"]  # another episode


def test_a_class_of_tools_has_an_instance_for_each_episode():
    tools = [f"{FILE}:Memory", f"{FILE}:multiply", "calculator"]
    names = [schema["function"]["name"] for schema in tool_schemas(tools)]
    assert names == ["recall", "store", "multiply", "calculator"]
    with EpisodePool([TOOLBOX], timeout_s=30.0, memory_mb=512, tools=tools) as pool:
        for number in (0, 1):
            pool.start(number, TOOLBOX, {}, 0, {})
            next_answer(pool)
        pool.step(0, "", [{"name": "store", "arguments": {"key": "a", "value": "b"}}])
        next_answer(pool)
        for number, expected in ((0, "b"), (1, "Error: KeyError: 'a'")):
            pool.step(number, "", [{"name": "recall", "arguments": {"key": "a"}}])
            assert next_answer(pool).observation[0]["content"] == expected
        pool.step(1, "", [{"name": "multiply", "arguments": {"a": 6, "b": 7}}])
        assert next_answer(pool).observation[0]["content"] == "42"


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        (["calculater"], "did you mean 'calculator'"),
        (["nothing.py:tool"], "no file"),
        ([f"{FILE}:multiply", f"{FILE}:multiply"], "the tool multiply twice"),
        ([f"{FILE}:Silent"], "press"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(tools, reason):
    if reason == "press":
        assert tool_schemas(tools)[0]["function"]["name"] == "press"
        return
    with pytest.raises(UserError, match=re.escape(reason)):
        tool_schemas(tools)


@pytest.fixture
def rows(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": "Find the word.", "secret": "apple"}, {"prompt": "Find the word.", "secret": "pear"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_environment_factory_gets_rows_and_rewards_get_state(rows):
    values = {
        "environment_factory": f"{FILE}:WordleEnv",
        "data_path": str(rows),
        "reward_funcs": [f"{FILE}:guesses_made", f"{FILE}:last_role"],
    }
    seen = []

    def script(turn: int, new: str) -> str:
        seen.append(new)
        return [call("guess", word="pear"), call("guess", word="apple"), "Done."][turn]

    config = load(None, [f"{key}={json.dumps(value)}" for key, value in values.items()]).config
    assert config.tasks.reward_funcs == [*values["reward_funcs"], "accuracy"]
    assert environments_of(config) == [f"{FILE}:WordleEnv"]
    task = make_task(config, "environment", config.tasks.datasets["environment"], "train")
    questions = {task.problem(i).question for i in range(len(task))}
    assert questions <= {"Find the word. It has 5 letters.", "Find the word. It has 4 letters."}
    flat = {"datasets": {"environment": {"config": {"factory": f"{FILE}:WordleEnv", "path": str(rows)}}}}
    with playing({**flat, "reward_funcs": values["reward_funcs"]}) as session:
        scores = [play(session, script, problem).score for problem in range(2)]
    # The last guess decides: apple. 0.1 for each guess, 1 for an assistant's last word.
    by_accuracy = {score.parts["accuracy"]: score.reward for score in scores}
    assert by_accuracy == pytest.approx({0.0: 1.2, 1.0: 2.2})
    assert any("Find the word. It has" in text for text in seen)


@pytest.mark.slow
def test_an_environment_without_a_reward_is_paid_by_functions(tmp_path):
    values = {
        "datasets": {
            "environment": {"config": {"factory": f"{FILE}:Silent", "path": str(tmp_path / "r.jsonl")}}
        },
        "reward_funcs": f"{FILE}:presses",
    }
    (tmp_path / "r.jsonl").write_text('{"prompt": "Press it twice."}\n')
    with playing(values) as session:
        rollout = play(session, lambda turn, new: call("press") if turn < 2 else "Done.")
    assert rollout.score.reward == 2.0 and "correct" not in rollout.score.parts


def test_several_environments_are_chosen_by_a_column(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"environment": "a", "secret": "fig"}\n{"environment": "b", "prompt": "Press."}\n')
    factory = {"a": f"{FILE}:WordleEnv", "b": f"{FILE}:Silent"}
    config = build(
        {
            "eval_num_samples": 0,
            "datasets": {"environment": {"config": {"factory": factory, "path": str(path)}}},
        }
    )
    task = make_task(config, "environment", config.tasks.datasets["environment"], "train")
    problems = [task.problem(index) for index in range(2)]
    assert [problem.environment for problem in problems] == list(factory.values())
    assert [p.tools[0]["function"]["name"] for p in problems] == ["guess", "press"]
    path.write_text('{"environment": "c"}\n')
    task = make_task(config, "environment", config.tasks.datasets["environment"], "train")
    with pytest.raises(UserError, match="'c' as `environment`"):
        task.problem(0)


def test_a_program_is_repaired_by_the_tests_that_are_shown():
    observations = []
    values = {"datasets": {"repair": {"config": {"path": "problems", "language": "python"}}}}
    with playing({**values, "reward_timeout_s": 60}) as session:
        for number in range(2):
            row = session.mixture.problem(number).answer
            turns = [f"```python\n{row['wrong']}\n```", f"```python\n{row['solution']}\n```"]

            def script(turn: int, new: str, turns: list[str] = turns) -> str:
                observations.append(new)
                return turns[turn]

            rollout = play(session, script, number)
            assert rollout.score.outcome == "passed" and rollout.score.reward > 0
            assert rollout.text == turns[1]
        rollout = play(session, lambda turn, new: "```python\n1 +\n```", 2)
    assert "tests fail:\n- " in observations[1] and "expected" in observations[1] + observations[3]
    assert len(rollout.turns) == 3 and rollout.score.outcome == "compile_error"
    assert rollout.episode is not None and "SyntaxError" in rollout.episode.messages[1]["content"]


def test_games_pay_no_format_by_default():
    for name in (*GAMES, "repair", "environment"):
        assert build({"datasets": {name: {}}}).tasks.reward_funcs == ["accuracy"], name


def test_hidden_tests_are_not_shown():
    config = build(
        {
            "eval_num_samples": 0,
            "datasets": {"repair": {"config": {"path": "problems", "language": "python"}}},
        }
    )
    task = make_task(config, "repair", config.tasks.datasets["repair"], "train")
    for index in range(5):
        answer = task.problem(index).answer
        assert 1 <= len(answer["row"]["row"]["shown"]) < len(answer["tests"])
