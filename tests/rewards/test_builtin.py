"""Format and length rewards and their sum, worked out by hand."""

import pytest

from whetstone.rewards.builtin import combine, format_reward, overlong_penalty, part_names


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("noise <think>a</think> noise <answer>b</answer> noise", 1.0),
        ("<think>a</think><answer>b", 0.75),
        ("<answer>b</answer>", 0.5),
        ("<think>a<think></think><answer>b</answer>", 0.75),  # <think> twice
        ("<think>a</think><answer>1</answer><answer>2</answer>", 0.5),
        ("</think><think><answer>b</answer>", 0.75),  # </think> before <think>
        ("<answer>b</answer><think>a</think>", 0.5),  # the answer before the thought
        ("", 0.0),
        ("<think></think><answer></answer>", 0.0),
        ("<think>\n \t</think><answer>\u200b\ufeff\u2060</answer>", 0.0),
        ("<think>\u00ad\u200e</think><answer>\u3164\u2800\u0301\x00</answer>", 0.0),
        ("<think></think><answer>5</answer>", 0.5),
        ("<think>a</think><answer> </answer>", 0.5),
        ("<think></think><answer>1</answer><answer>2</answer>", 0.0),
        ("<think>.</think><answer>\N{SNOWMAN}</answer>", 1.0),
    ],
)
def test_a_quarter_for_each_tag_once_and_in_order(text: str, reward: float):
    assert format_reward(text) == reward


def test_the_assistant_prefix_counts_as_written():
    prefix = "Let me solve this step by step.\n<think>"
    assert format_reward(prefix + "a</think><answer>b</answer>") == 1.0
    assert (
        format_reward(prefix + "<think>a</think><answer>b</answer>") == 0.75
    )  # now <think> stands there twice
    assert format_reward(prefix + "</think><answer>b</answer>") == 0.5  # nothing was thought


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0.0), (75, 0.0), (80, -0.2), (90, -0.6), (100, -1.0), (120, -1.0)]
)
def test_overlong_penalty_falls_linearly_over_the_buffer(num_tokens: int, penalty: float):
    assert overlong_penalty(num_tokens, 100, 25) == pytest.approx(penalty)


def test_no_buffer_no_penalty():
    assert overlong_penalty(100, 100, 0) == 0.0


def test_reward_is_the_weighted_sum_of_the_parts_that_apply():
    parts = {"correct": 1.0, "accuracy": 1.0, "format": 0.75, "close": -0.5}
    assert combine(parts, ["accuracy", "format", "close"], None) == 1.25
    assert combine(parts, ["accuracy", "format", "close"], [2.0, 0.4, 1.0]) == pytest.approx(1.8)
    assert combine(parts, ["accuracy", "absent"], [1.0, 100.0]) == 1.0


def test_parts_carry_the_functions_name_unless_two_share_it():
    assert part_names(["accuracy", "my.py:close"]) == ("accuracy", "close")
    assert part_names(["a.py:close", "b.py:close"]) == ("a.py:close", "b.py:close")
