"""Intervals, pass@k and the paired test, against numbers worked out by hand or from statistical tables."""

import itertools
import math

import pytest

from whetstone.evaluation.statistics import (
    accuracy,
    paired,
    pass_at_k,
    pass_at_k_table,
    sign_test,
    t_quantile,
    t_two_sided,
    wilson,
)


def singles(num_right: int, num: int) -> list[list[bool]]:
    return [[i < num_right] for i in range(num)]


def test_wilson_interval_of_one_half_in_a_hundred():
    # z^2 = 3.8415; centre 0.5192 / 1.0384 = 0.5; half width 1.96 / 1.0384 * sqrt(0.0025 + 0.000096) = 0.09617
    low, high = wilson(0.5, 100)
    assert (low, high) == pytest.approx((0.40383, 0.59617), abs=1e-5)


def test_wilson_bounds_solve_the_score_equation():
    # The definition: at a bound p, the observed share is exactly z standard errors (taken at p) away.
    low, high = wilson(0.345, 200)
    for bound in (low, high):
        assert abs(0.345 - bound) / math.sqrt(bound * (1 - bound) / 200) == pytest.approx(1.959964, abs=1e-6)


def test_wilson_at_the_ends():
    # n / (n + z^2) is the lower bound where all are right: 10 / 13.8415
    assert wilson(1.0, 10) == pytest.approx((0.72247, 1.0), abs=1e-5)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)


def test_accuracy_of_single_samples_is_wilson():
    result = accuracy(singles(69, 200))
    assert (result.mean, result.num_problems) == (0.345, 200)
    assert (result.low, result.high) == wilson(0.345, 200)


def test_accuracy_interval_is_t_over_problems():
    # Problem means 1, 0.5, 0.5, 0: s^2 = 0.5 / 3, standard error 0.204124; t(3) = 3.18245: half width 0.64962
    table = [[True] * 4, [True, True, False, False], [False, True, False, True], [False] * 4]
    result = accuracy(table)
    assert (result.mean, result.low, result.high) == (0.5, 0.0, 1.0)  # clipped: 0.5 - 0.65 < 0
    # Eight times the problems: s^2 = 4/31, standard error 0.063500, t(31) = 2.03951: half width 0.12951
    result = accuracy(table * 8)
    assert (result.low, result.high) == pytest.approx((0.37049, 0.62951), abs=1e-5)


def test_more_samples_per_problem_do_not_narrow_the_interval():
    few, many = (
        accuracy([[True, False], [True, True], [False, False]] * 10),
        accuracy([[True, False] * 8, [True, True] * 8, [False, False] * 8] * 10),
    )
    assert (few.low, few.high) == (many.low, many.high)


def test_problems_that_all_came_out_alike_still_have_an_interval():
    assert accuracy([[True] * 4] * 10).low == pytest.approx(0.72247, abs=1e-5)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.30265), (5, 2.57058), (14, 2.14479), (30, 2.04227), (199, 1.97196)],
)
def test_t_quantiles_are_those_of_the_printed_table(degrees: int, quantile: float):
    assert t_quantile(degrees) == pytest.approx(quantile, abs=5e-5)


def test_t_with_one_and_two_degrees_has_a_closed_form():
    for t in (0.1, 1.0, 3.7, 50.0):
        assert t_two_sided(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), rel=1e-12)
        assert t_two_sided(-t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-9)
    assert t_two_sided(0.0, 7) == 1.0


def test_pass_at_k_by_counting_every_draw():
    right = [True, False, True, False, False, False]
    for k in range(1, 7):
        draws = list(itertools.combinations(right, k))
        assert pass_at_k(6, 2, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def test_pass_at_k_has_powers_of_two_and_sample_count():
    # c = 1 of 6: k/6; c = 0: 0; the mean of both is k/12
    table = pass_at_k_table([[True] + [False] * 5, [False] * 6])
    assert table == pytest.approx({1: 1 / 12, 2: 2 / 12, 4: 4 / 12, 6: 6 / 12})
    assert list(pass_at_k_table([[True]])) == [1]
    assert list(pass_at_k_table([[True] * 8])) == [1, 2, 4, 8]


def test_mcnemar_by_hand():
    # 1 worse of 6 that changed: 2 * (C(6,0) + C(6,1)) / 2^6 = 14 / 64
    assert sign_test(5, 1) == sign_test(1, 5) == 14 / 64
    assert sign_test(0, 0) == 1.0
    assert sign_test(3, 3) == 1.0
    assert sign_test(10, 0) == 2 / 1024
    assert sign_test(1100, 0) < 1e-300  # far beyond what a float can count


def test_paired_difference_of_single_samples():
    # 5 of 10 got better, 1 worse, 4 stayed: difference 0.4. Bonett and Price: (6 - 2) / 12 = 1/3, variance
    # (8/12 - 1/9) / 12 = 0.046296, half width 1.96 * 0.215166 = 0.421718
    before = [[False]] * 5 + [[True]] * 5
    after = [[True]] * 5 + [[False]] + [[True]] * 4
    result = paired(before, after)
    assert result.difference == pytest.approx(0.4)
    assert (result.low, result.high) == pytest.approx((-0.088384, 0.755051), abs=1e-5)
    assert result.p_value == 14 / 64


def test_paired_difference_of_several_samples_is_a_paired_t_test():
    # Changes 0.5, 0.5, 0, 0.25, 0: mean 0.25, s = 0.25, standard error 0.111803, t = 2.236068 at 4 degrees.
    # For 4 degrees p = 1 - y (3 - y^2) / 2 with y = t / sqrt(t^2 + 4) = 0.745356: p = 0.0890
    before = [[False] * 4, [True, True, False, False], [True] * 4, [False] * 4, [False] * 4]
    after = [[True, True, False, False], [True] * 4, [True] * 4, [True, False, False, False], [False] * 4]
    result = paired(before, after)
    assert result.difference == pytest.approx(0.25)
    y = math.sqrt(5) / 3
    assert result.p_value == pytest.approx(1 - y * (3 - y * y) / 2, rel=1e-9)
    # t(4) = 2.776445
    assert (result.low, result.high) == pytest.approx((0.25 - 0.310416, 0.25 + 0.310416), abs=1e-5)


def test_pairing_sees_what_separate_intervals_do_not():
    # 12 of 200 got better and none worse: the two Wilson intervals overlap widely, the pairs leave no doubt.
    before, after = singles(100, 200), singles(112, 200)
    assert accuracy(before).high > accuracy(after).low
    assert paired(before, after).p_value == 2 / 2**12
    assert paired(before, after).low > 0


def test_no_change_at_all_is_no_evidence():
    for table in (singles(3, 10), [[True, False]] * 10):
        result = paired(table, table)
        assert (result.difference, result.p_value) == (0.0, 1.0)
        assert result.low == -result.high < 0
