"""Text of a model costs linear time: 1 MB of each parser's own worst case takes less than a second."""

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import rollouts
from whetstone.endpoint.choice import Choice, Codec, TokenChunk
from whetstone.endpoint.text_stream import StopTexts
from whetstone.environments.calls import block_calls, fenced_calls, parse_calls
from whetstone.report.page import esc
from whetstone.rewards import matching
from whetstone.rewards.answers import extract_math
from whetstone.rewards.builtin import format_reward
from whetstone.rewards.programs import extract_program
from whetstone.sandbox.languages import LANGUAGES

SIZE = 1_000_000
PYTHON = LANGUAGES["python"]
TOOLS = [{"type": "function", "function": {"name": "a"}}]
CODEC = Codec(chat=rollouts.Codec(), stop_ids=frozenset())


def streamed(text: str) -> None:
    """A long answer, a token at a time."""
    choice = Choice(CODEC, ["STOP"], tools=TOOLS)
    for _ in range(len(text) // 50):
        choice.push(TokenChunk(sample=0, token_ids=(9,), logprobs=(0.0,)))


def stopped(text: str) -> None:
    stops = StopTexts(["a" * 50 + "b"])
    for start in range(0, len(text), 100):
        stops.push(text[start : start + 100])


# What is repeated, with what stands before it and behind it: each took time that grows with the square, or
# is the slowest of some thousand combinations of pieces that the patterns know.
PARSERS: dict[str, tuple[Callable[[str], Any], list[tuple[str, str, str]]]] = {
    "calls": (
        lambda text: parse_calls(text, TOOLS),
        [
            ("", "to=functions.python ", ""),
            ("to=functions.", "a", ""),
            ("<|channel|>", "to=functions.a<|message|>", ""),
            ("[TOOL_CALLS]a", " ", "b"),
            ("", "[TOOL_CALLS]a", ""),
            ("", "<tool_call>", ""),
            ("", "<think></think>", ""),
            ('{"name""arguments"}', " ", ";"),
            ("", '{"arguments""name"};', ""),
            ("<tool_call>", "[", ""),
            ("", '<tool_call>{"name": "a"}', ""),
            ("<tool_call>", '{"name": "a"};', ""),
            ("<tool_call>", "<function=", ""),
            ("<tool_call><function=", "a", ""),
            ("<tool_call>", "<function=a>", ""),
            ("<tool_call><function=a>", "<parameter=", ""),
            ("<tool_call><function=a>", "<parameter=b>", ""),
            ("<tool_call><function=a><parameter=", "b", ""),
            ("<minimax:tool_call>", '<invoke name="', ""),
            ("<minimax:tool_call>", "<", ""),
            ("<tool_call>a<arg_key>", " ", ""),
            ("<tool_call>a", "<arg_key>b</arg_key>", ""),
            ("<tool_call>a", "<arg_key>b</arg_key><arg_value>", ""),
            ("<tool_call>", " ", "a"),
            ("<|tool_call>call:a{", "a", ""),
            ("<|tool_call>call:a{", "a:{", ""),
            ("<|tool_call>call:a{", '<|"|>', ""),
            ("<|tool_call_start|>[a(x=", "[", ""),
            ("<|tool_call_start|>[a(x=", "-", "1)]"),
            ("<|tool_call_start|>[", "a(),", "]"),
            ("[", "a(),", "]"),
            ("[a(", "x", ""),
            ("[TOOL_CALLS]a{", "}", "{"),
            ("[TOOL_CALLS]", "a[ARGS]", ""),
            ("", "[TOOL_CALLS]a[ARGS]{}", ""),
            ("", "<|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{}", ""),
            ('{"', '"name"', ""),
            ('[{"', '"arguments"', ""),
        ],
    ),
    "fences": (
        lambda text: fenced_calls(text, TOOLS, ""),
        [("", "```", ""), ("", '```"name"', ""), ("", "`", "")],
    ),
    "blocks": (
        lambda text: block_calls(text, {"a": "x"}),
        [("```", "a", ""), ("```a", " ", "b"), ("", "```a\n", "")],
    ),
    "programs": (
        lambda text: extract_program(text, PYTHON, False),
        [("```", "a", ""), ("```", " ", ""), ("", "```", ""), ("", "```\n", "a")],
    ),
    "answers": (
        extract_math,
        [("", "\\boxed{", ""), ("", "\\boxed{}", ""), ("", "\\boxed{1},", ""), ("", "<answer>", "</answer>")],
    ),
    "last lines": (
        lambda text: matching.extract(text, "normalized"),
        [("", " ", "b"), ("$", "\t", "}"), ("so ", " ", "a"), ("answer", " ", "a"), ("", "the ", "")],
    ),
    "numbers": (
        lambda text: matching.extract(text, "numeric"),
        [("", "1,", ""), ("", "1", "a"), ("", "1/0 ", ""), ("1", " ", "/"), ("", "111,", "a")],
    ),
    "comparison": (
        lambda text: (matching.same(text, "42", "numeric"), matching.same(text, "42", "normalized")),
        [("", "1,", ""), ("a", " ", "b"), ("", "$", "1")],
    ),
    "format": (format_reward, [("<answer>", " ", "</answer>"), ("", "<think>", "")]),
    "report": (esc, [("", "\ud83d", ""), ("", "<", "")]),
    "streams": (streamed, [("", "a", "")]),
    "stop texts": (stopped, [("", "a", ""), ("", "ab", "")]),
}  # fmt: skip


def seconds(parser: Callable[[str], Any], size: int, before: str, piece: str, behind: str) -> float:
    """Without the garbage collector, whose time is that of all objects which earlier tests have left."""
    text = before + piece * (size // len(piece)) + behind
    gc.collect()
    gc.disable()
    try:
        started = time.process_time()
        parser(text)
        return time.process_time() - started
    finally:
        gc.enable()


@pytest.mark.parametrize("name", PARSERS)
def test_a_megabyte_takes_less_than_a_second(name):
    """A machine that is busy may take longer, but then only eight times as long as for an eighth of it."""
    parser, cases = PARSERS[name]
    for case in cases:
        assert seconds(parser, SIZE // 50, *case) < 0.5, case  # the square of it would take hours below
        took = seconds(parser, SIZE, *case)
        assert took < 1 or took < 16 * seconds(parser, SIZE // 8, *case), case
