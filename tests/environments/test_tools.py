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
        '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"number": 7}</s>',
        "<tool_call>\n<function=add>\n<parameter=number>\n7\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>add\n<arg_key>number</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
        "<seed:tool_call><function=add><parameter=number>7</parameter></function></seed:tool_call>",
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="number">7</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        "<|tool_call_start|>[add(number=7)]<|tool_call_end|><|im_end|>",
        "[add(number=7)]<|eot_id|>",
        "[add(7)]",
        "<|tool_call>call:add{number:7}<tool_call|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"number": 7}<|tool_call_end|><|tool_calls_section_end|>',
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function"
        '<\uff5ctool\u2581sep\uff5c>add\n```json\n{"number": 7}\n```<\uff5ctool\u2581call\u2581end\uff5c>',
        '<|START_ACTION|>[{"tool_name": "add", "parameters": {"number": 7}}]<|END_ACTION|>',
        '<|tools_prefix|>[{"add": {"number": 7}}]<|tools_suffix|>',
        '<|tool_call|>[{"name": "add", "arguments": {"number": 7}}]',
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"number": 7}<|call|>',
    ],
)
def test_calls_are_read_in_the_formats_of_chat_templates(text):
    assert parse_calls(text, [tool_schema(counter.Counter().add)]) == [CALL]


def test_values_have_the_types_of_the_tool():
    """Formats that write every value as a text; what is no JSON stays one."""
    kinds = {"n": "integer", "s": "string", "b": "boolean", "l": "array", "o": "object", "f": "number"}
    schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in kinds.items()}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    values = {"n": "7", "s": "7", "b": "True", "l": '["a", 1]', "o": '{"k": null}', "f": "x < y", "u": "1.5"}
    expected = {"n": 7, "s": "7", "b": True, "l": ["a", 1], "o": {"k": None}, "f": "x < y", "u": 1.5}
    xml = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    glm = "".join(
        f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n" for name, value in values.items()
    )
    for body in (f"<function=f>\n{xml}</function>", f"f\n{glm}"):
        assert parse_calls(f"<tool_call>\n{body}</tool_call>", tools) == [
            {"name": "f", "arguments": expected}
        ]
    lines = "<tool_call><function=f><parameter=s>\n  a\n\n b\n</parameter></function></tool_call>"
    assert parse_calls(lines, tools)[0]["arguments"] == {"s": "  a\n\n b"}
    gemma = '<|tool_call>call:f{o:{k:[1,<|"|>a:{b}<|"|>],t:true},s:<|"|>"q"<|"|>}<tool_call|>'
    assert parse_calls(gemma)[0]["arguments"] == {"o": {"k": [1, "a:{b}"], "t": True}, "s": '"q"'}
    assert parse_calls("<tool_call>f\n</tool_call>", tools) == [{"name": "f", "arguments": {}}]


def test_lists_in_python_hold_literals_only():
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}, "y": {}}}}}
    ]
    for text, arguments in (
        ("f(x={'a': [1, -2.5, None, True]})", {"x": {"a": [1, -2.5, None, True]}}),
        ("f(1, y='it\\'s')", {"x": 1, "y": "it's"}),
        ("f()", {}),
    ):
        assert parse_calls(f"[{text}]", tools) == [{"name": "f", "arguments": arguments}]
    assert [call["name"] for call in parse_calls("[f(), f(x=1)]", tools)] == ["f", "f"]
    for text in (
        "f(x=open('a'))", "f(x=1 + 1)", "f(x=[i for i in 'ab'])", "f(x=y)", "f(**{'x': 1})", "f(1, 2, 3)",
        "f(*x)",
        "f(x=f'{1}')", "f()()", "(lambda: f)()", "f(x=", "f(x=" + "(" * 9000, "f(x=" + "-" * 9000 + "1)",
        "f(x='" + "a" * 10_000 + "')", "f(x=1), 2",
    ):  # fmt: skip
        [call] = parse_calls(f"<|tool_call_start|>[{text}]<|tool_call_end|>", tools)
        assert set(call) == {"error"}, text[:40]
    assert parse_calls("[f(x) for x in y]") == [] == parse_calls("The list is [f(x=1)]", tools)
    assert parse_calls("[sin(x), cos(x)]", tools) == []  # no tool: an answer


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


def test_call_in_a_code_fence_is_an_error_with_a_remedy():
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
