"""Tools: descriptions as transformers makes them, calls in the formats of chat templates, TRL's shape."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from tests.environments import counter
from whetstone.environments.calls import block_calls, fenced_calls, parse_calls
from whetstone.environments.pool import EpisodePool
from whetstone.environments.tools import tool_schema

COUNTER = f"{Path(counter.__file__)}:Counter"
CALL = {"name": "add", "arguments": {"number": 7}}


def lookup(city: str, days: int = 3, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> str:
    """
    The weather of the next days.

    Args:
        city: The city,
            in English.
        days: How many days.
        unit: The unit.
        tags: What else to say.

    Returns:
        A sentence.
    """
    return ""


def area(width: float, height: float, exact: bool = False, options: dict[str, int] | None = None) -> float:
    """
    The area of a rectangle.

    Args:
        width: The width.
        height: The height.
        exact: Whether to round.
        options: Other options.
    """
    return width * height


def convert(
    value: int | str | None,
    pair: tuple[int, str],
    level: Literal["low", 1],
    nested: list[dict[str, float]] | int,
    anything: Any,
) -> dict[str, Any]:
    """
    Convert a value.

    Args:
        value: The value.
        pair: Two of them.
        level: How.
        nested: Many.
        anything: Whatever.

    Returns:
        The result,
        in two lines.

    Raises:
        ValueError: Never.
    """
    return {}


FUNCTIONS = [lookup, area, convert, counter.Counter().add]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_descriptions_are_those_of_transformers(function):
    # As text: the order of the keys is that in which a chat template writes them.
    assert json.dumps(tool_schema(function)) == json.dumps(get_json_schema(function))


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "add", "arguments": {"number": 7}}\n</tool_call>',
        'I add.\n<tool_call>{"name": "add", "arguments": "{\\"number\\": 7}"}</tool_call><|im_end|>',
        '<tool_call>\n{"name": "add", "arguments": {"number": 7}}',
        '{"name": "add", "parameters": {"number": 7}}<|eom_id|>',
        '<|python_tag|>{"name": "add", "parameters": {"number": 7}}<|eot_id|>',
        '[TOOL_CALLS][{"name": "add", "arguments": {"number": 7}}]</s>',
        '[TOOL_CALLS]add[ARGS]{"number": 7}</s>',
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"number": 7}<|call|>',
    ],
)
def test_calls_are_read_in_the_formats_of_chat_templates(text):
    assert parse_calls(text) == [CALL]


def test_several_calls_and_none():
    two = "<tool_call>" + '{"name": "a", "arguments": {}}' + "</tool_call>\n"
    assert [call["name"] for call in parse_calls(two * 2)] == ["a", "a"]
    assert len(parse_calls(two * 1000)) == 1000
    llama = '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}'
    assert [call["name"] for call in parse_calls(llama)] == ["a", "b"]
    assert parse_calls("The answer is 10.") == [] == parse_calls("") == parse_calls('{"value": 3}')


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>add(7)</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [7]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "seven"}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "[TOOL_CALLS]add",
        "[TOOL_CALLS][{]",
    ],
    ids=range(8),
)
def test_malformed_calls_are_errors_and_nothing_raises(text):
    [call] = parse_calls(text)
    assert set(call) == {"error"}


def test_a_call_in_a_code_fence_is_an_error_that_says_how_to_write_it():
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = '{"name": "add", "arguments": {"number": 7}}'
    error = {"error": "the call of add is in a code fence: write it otherwise"}
    for text in (f"```json\n{call}\n```", f"I add.\n```\n{call}```<|im_end|>", f"```json\n{call}"):
        assert parse_calls(text) == [] and fenced_calls(text, tools, "write it otherwise") == [error]
    for text in (
        call,
        "```python\nadd(7)\n```",
        '```json\n{"name": "sub", "arguments": {}}```',
        '```"name"' + "[" * 99_999,
    ):
        assert fenced_calls(text, tools, "") == []


def test_blocks_of_code_are_calls_of_the_tool_of_that_name():
    arguments = {"python": "code", "sql": "query"}
    one = {"name": "python", "arguments": {"code": "x = 1\nprint(x)\n"}}
    for text in (
        "I try.\n```python\nx = 1\nprint(x)\n```",
        "```Python \nx = 1\nprint(x)\n```\nIt prints 1.\n```\n1\n```",
        "```python\nx = 1\nprint(x)\n",  # not closed
        "```json\n{}\n```\n```python\nx = 1\nprint(x)\n  ```",
    ):
        assert block_calls(text, arguments) == [one], text
    two = block_calls("```sql\nselect 1\n```\nthen\n```python\nprint('```')\n```", arguments)
    assert [(call["name"], *call["arguments"].items()) for call in two] == [
        ("sql", ("query", "select 1\n")),
        ("python", ("code", "print('```')\n")),
    ]
    for text in ("print(1)", "```\nprint(1)\n```", "```bash\nls\n```", "`python`", "say ```python x```", ""):
        assert block_calls(text, arguments) == []


def test_an_environment_in_trls_shape_is_played_by_calls():
    with EpisodePool([COUNTER], timeout_s=10.0, memory_mb=512) as pool:
        pool.start(0, COUNTER, {}, 1, {"start": 3})
        [opening] = pool.poll(10.0)
        assert opening.observation[0]["content"] == "The counter is at 3. Bring it to 10."
        pool.step(0, "", [CALL, {"name": "add", "arguments": {"number": 0}}, {"error": "no JSON"}])
        [answer] = pool.poll(10.0)
        contents = [message["content"] for message in answer.observation]
        assert contents == ["10", "Error: ValueError: number must be at least 1", "Error: no JSON."]
        assert (answer.num_tool_calls, answer.num_tool_errors, answer.done) == (3, 2, False)
        pool.step(0, "Done.")
        [answer] = pool.poll(10.0)
        assert answer.done
        pool.finish(0)
        assert pool.poll(10.0)[0].reward == 1.0
