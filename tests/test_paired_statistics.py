"""experiments/paired_statistics.py: intervals of paired differences, and the verdicts that follow from them."""

import math

import pytest
from support.evidence_scripts import paired_statistics


def test_paired_statistics_of_five_differences():
    # By hand: mean 3, sd √2.5, t = 3/(√2.5/√5) = 3√2; t(0.975, 4) = 2.776445; Wilcoxon of five positives: 2/2⁵.
    result = paired_statistics.paired([1, 2, 3, 4, 5])
    half = 2.776445 * math.sqrt(2.5 / 5)
    assert result.n == result.wins == 5
    assert result.mean == pytest.approx(3)
    assert result.sd == pytest.approx(math.sqrt(2.5))
    assert (result.low, result.high) == pytest.approx((3 - half, 3 + half), rel=1e-6)
    assert result.t == pytest.approx(3 * math.sqrt(2))
    assert result.wilcoxon_p == pytest.approx(2 / 2**5)


@pytest.mark.parametrize("differences", [[], [1.0], [2.0, 2.0, 2.0], [0.0, 0.0], [0.0, 1.0, -1.0, 2.0]])
def test_few_or_equal_differences_are_no_error(differences):
    assert paired_statistics.paired(differences).n == len(differences)


def summary_of(low, high, n=5):
    return paired_statistics.Paired(n, (low + high) / 2, 1.0, low, high, 0.0, 0.0, 0, 0.0)


@pytest.mark.parametrize(
    ("low", "high", "n", "verdict"),
    [
        (7.0, 9.5, 12, "reproduced"),
        (0.2, 1.4, 12, "sign reproduced, size not"),
        (-0.2, 5.0, 12, "not reproduced"),
        (-0.2, 9.5, 12, "cannot decide here: interval too wide"),
        (-3.0, -1.0, 12, "not reproduced"),
        (7.0, 9.5, 2, "cannot decide here: too few pairs"),
    ],
)
def test_verdict_of_a_gain_follows_from_the_interval(low, high, n, verdict):
    assert paired_statistics.gain_verdict(summary_of(low, high, n), 8.98) == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.4, 0.6, "reproduced"),
        (-3.0, 2.0, "cannot decide here: interval too wide"),
        (0.5, 2.0, "not reproduced"),
    ],
)
def test_verdict_of_an_equality_needs_a_narrow_interval(low, high, verdict):
    assert paired_statistics.equal_verdict(summary_of(low, high)) == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.0, 0.5, "reproduced"),
        (-2.0, 2.0, "cannot decide here: interval too wide"),
        (0.5, 1.0, "not reproduced"),
    ],
)
def test_verdict_of_a_value_in_points_needs_a_narrow_interval(low, high, verdict):
    assert paired_statistics.value_verdict(summary_of(low, high), 0.28, 0.28, 1.0) == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.1, 4.0, "ahead"),
        (-4.0, -0.1, "behind"),
        (-0.9, 0.9, "level"),
        (-0.9, 1.1, "cannot decide here: interval too wide"),
    ],
)
def test_level_needs_an_interval_within_a_point(low, high, verdict):
    assert paired_statistics.side(summary_of(low, high)) == verdict
