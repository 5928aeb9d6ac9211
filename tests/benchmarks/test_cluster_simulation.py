"""The discrete event model: times worked out by hand."""

from dataclasses import replace

import pytest

from benchmarks.cluster.simulation import (
    Engines,
    Stages,
    draw_batches,
    fullest_engine_seconds,
    longest_first,
    simulate,
)


def engines(**changes: object) -> Engines:
    """A step takes 1 s and half a second for each sequence."""
    kind = Engines(
        number=1, slots=8, step_s=lambda number: 1 + 0.5 * number, cache_token_s=0.0, prompt_tokens=10
    )
    return replace(kind, **changes)  # pyright: ignore


def stages(kind: Engines, **changes: object) -> Stages:
    return replace(Stages(engines=kind, transfer_s=0.0, exchange_s=0.0, update_s=4.0), **changes)  # pyright: ignore


def rollout_s(kind: Engines, groups: list[list[int]]) -> float:
    return simulate(stages(kind), [groups, groups]).rollout_s


def test_one_sequence_on_one_engine() -> None:
    kind = engines(cache_token_s=0.1)
    # 5 steps of 1.5 s; keys and values of 10, 11, 12, 13 and 14 tokens are read
    assert rollout_s(kind, [[5]]) == pytest.approx(5 * 1.5 + 0.1 * 60)
    parts = engines(start_s=7.0, prompt_s=3.0, sequence_s=2.0)
    assert rollout_s(parts, [[5]]) == pytest.approx(7 + 3 + 7.5 + 2)
    assert rollout_s(engines(host_s=lambda number: 4.0 * number), [[5]]) == pytest.approx(5 * 4)


def test_a_group_shares_its_prompt_and_samples_of_a_queue_do_not() -> None:
    kind = engines(prompt_s=3.0)
    assert rollout_s(kind, [[2, 2], [2, 2]]) == pytest.approx(2 * 3 + 2 * (1 + 4 * 0.5))
    assert rollout_s(replace(kind, is_shared=True), [[2, 2], [2, 2]]) == pytest.approx(4 * 3 + 2 * 3)


def test_two_engines_and_a_straggler() -> None:
    result = simulate(stages(engines(number=2)), [[[2, 2], [2, 10]]] * 3)
    # the second: 2 steps of two sequences, 8 of one; the first is done after 2 steps
    slow, fast = 2 * 2.0 + 8 * 1.5, 2 * 2.0
    assert result.rollout_s == pytest.approx(slow)
    assert result.step_s == pytest.approx(slow + 4)
    assert result.sampler_idle == result.trainer_idle == pytest.approx((slow - fast) / 2 / (slow + 4))
    assert result.tokens_per_s == pytest.approx(16 / (slow + 4))


def test_slots_are_filled_again() -> None:
    assert rollout_s(engines(slots=1), [[3, 4]]) == pytest.approx(7 * 1.5)
    # 3 steps of two; then the third sequence beside the second for one step, then alone
    assert rollout_s(engines(slots=2), [[3, 4, 2]]) == pytest.approx(3 * 2 + 1 * 2 + 1 * 1.5)


def test_servers_take_the_next_sample_when_they_are_free() -> None:
    groups = [[1, 5, 1, 1]]
    # one of the servers has the long sample, the other one all the short ones
    assert rollout_s(engines(number=2, slots=1, is_shared=True), groups) == pytest.approx(5 * 1.5)
    assert rollout_s(engines(number=2, slots=1), groups) == pytest.approx(8 * 1.5)  # a group stays whole


@pytest.mark.parametrize("update_s", [4.0, 30.0])
def test_one_step_off_hides_the_shorter_stage(update_s: float) -> None:
    kind = stages(
        engines(is_shared=True), is_colocated=False, transfer_s=1.0, exchange_s=2.0, update_s=update_s
    )
    sampling = 10 * 1.5
    in_turn = simulate(kind, [[[10]]] * 4)
    assert in_turn.step_s == pytest.approx(1 + sampling + 2 + update_s)
    assert in_turn.rollout_s == pytest.approx(sampling + 2)
    ahead = simulate(replace(kind, is_ahead=True), [[[10]]] * 4)
    step_s = 1 + max(sampling + 2, update_s)
    assert ahead.step_s == pytest.approx(step_s)
    assert ahead.trainer_idle == pytest.approx(1 - update_s / step_s)
    assert ahead.sampler_idle == pytest.approx(1 - sampling / step_s)


def test_a_long_batch_delays_only_the_step_that_waits_for_it() -> None:
    kind = stages(engines(is_shared=True), is_colocated=False, is_ahead=True)
    # sampling 3, 15, 3 s beside updates of 4 s: the third update waits for 15 s
    result = simulate(kind, [[[2]], [[2]], [[10]], [[2]]])
    assert 3 * result.step_s == pytest.approx(4 + 15 + 4)


@pytest.mark.parametrize("is_shared", [False, True])
def test_more_engines_are_never_slower(is_shared: bool) -> None:
    [groups, *_] = draw_batches(prompts=32, group=4, mean=50, longest=300)
    kinds = [engines(number=number, slots=16, is_shared=is_shared) for number in (1, 2, 4, 8, 16, 32, 64)]
    seconds = [rollout_s(kind, groups) for kind in kinds]
    assert seconds == sorted(seconds, reverse=True)
    order = longest_first([[length] for group in groups for length in group] if is_shared else groups)
    for kind, simulated in zip(kinds, seconds, strict=True):
        assert fullest_engine_seconds(kind, order) == pytest.approx(simulated, rel=0.25)


def test_lengths_have_the_mean_that_was_asked_for_and_repeat() -> None:
    for mean in (100, 800, 950):
        batches = draw_batches(prompts=200, group=4, mean=mean, longest=1000)
        lengths = [length for groups in batches for group in groups for length in group]
        assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.03)
        assert max(lengths) <= 1000 and len(set(lengths)) > 20
        assert batches == draw_batches(prompts=200, group=4, mean=mean, longest=1000)
        assert batches != draw_batches(prompts=200, group=4, mean=mean, longest=1000, seed=1)
    assert draw_batches(prompts=1, group=2, mean=7, longest=7)[0] == [[7, 7]]
    assert draw_batches(prompts=1, group=2, mean=5, longest=7, spread=0)[0] == [[5, 5]]
    assert len(draw_batches(prompts=1000, group=16, mean=5, longest=7)) == 2
