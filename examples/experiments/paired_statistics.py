"""Statistics of paired differences, and the rules that turn an interval into a verdict.

Differences are in points of accuracy (hundredths) unless a caller says otherwise; intervals are 95 % by Student's t.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

FEWEST = 3  # pairs under which no verdict is given
SAME = 1.0  # points within which two arms count as equal

REPRODUCED = "reproduced"
SIGN_ONLY = "sign reproduced, size not"
NOT_REPRODUCED = "not reproduced"
UNDECIDED = "cannot decide here: interval too wide"
NOT_TESTABLE = "cannot decide here: too few pairs"
AHEAD, BEHIND, LEVEL = "ahead", "behind", "level"


class Paired(NamedTuple):
    """n paired differences; what n is too small for is NaN."""

    n: int
    mean: float
    sd: float = math.nan
    low: float = math.nan
    high: float = math.nan
    t: float = math.nan
    p: float = math.nan
    wins: int = 0
    wilcoxon_p: float = math.nan


def paired(differences: Sequence[float]) -> Paired:
    """Mean, standard deviation, 95 % interval, t test against zero, wins, Wilcoxon's signed-rank test."""
    x = np.asarray(differences, dtype=float)
    n, wins = len(x), int((x > 0).sum())
    mean = float(x.mean()) if n else math.nan
    if n < 2:
        return Paired(n, mean, wins=wins)
    sd = float(x.std(ddof=1))
    half = float(stats.t.ppf(0.975, n - 1)) * sd / math.sqrt(n)
    if sd == 0:  # scipy has no answer where every difference is the same
        return Paired(n, mean, sd, mean, mean, wins=wins)
    test = stats.ttest_1samp(x, 0.0)
    signed = stats.wilcoxon(x, method="exact" if (x != 0).all() else "approx")
    t, p = float(test.statistic), float(test.pvalue)
    return Paired(n, mean, sd, mean - half, mean + half, t, p, wins, float(signed.pvalue))


def gain_verdict(gain: Paired, claimed: float) -> str:
    """Reproduced: the interval is above 0 and reaches the claim. Not: it excludes the claim, or a point."""
    if gain.n < FEWEST:
        return NOT_TESTABLE
    if gain.low <= 0:
        return NOT_REPRODUCED if gain.high <= 0 or gain.high < max(claimed, SAME) else UNDECIDED
    return REPRODUCED if gain.high >= claimed else SIGN_ONLY


def side(gain: Paired) -> str:
    """Where a difference lies: ahead, behind, level (the whole interval within ±SAME), or not decided."""
    if gain.n < FEWEST:
        return NOT_TESTABLE
    if gain.low > 0 or gain.high < 0:
        return AHEAD if gain.low > 0 else BEHIND
    return LEVEL if gain.low >= -SAME and gain.high <= SAME else UNDECIDED


def value_verdict(value: Paired, low: float, high: float, precision: float = math.inf) -> str:
    """A value is reproduced when the interval meets [low, high] and is no wider than ± `precision`."""
    if value.n < FEWEST:
        return NOT_TESTABLE
    if value.low > high or value.high < low:
        return NOT_REPRODUCED
    return REPRODUCED if value.high - value.low <= 2 * precision else UNDECIDED


def equal_verdict(difference: Paired) -> str:
    """Equality is reproduced when the whole interval lies within ±SAME, refuted when the interval leaves 0 out."""
    if difference.n < FEWEST:
        return NOT_TESTABLE
    if difference.low >= -SAME and difference.high <= SAME:
        return REPRODUCED
    return UNDECIDED if difference.low <= 0 <= difference.high else NOT_REPRODUCED


RULES = f"""\
Intervals are 95 %, by Student's t over pairs that share start, images, order and mirroring. A claimed gain is
*{REPRODUCED}* when the whole interval is above 0 and reaches the claimed size, *{SIGN_ONLY}* when it is above 0 but
stays below that size, *{NOT_REPRODUCED}* when it includes or is below 0 and excludes the claimed size (at least
{SAME:g} point), and otherwise *{UNDECIDED}*. A claimed value is reproduced when the interval meets it (in points: with
at most ±{SAME:g}). A claimed absence of effect is reproduced when the whole interval lies within ±{SAME:g} point. A
rival is *{LEVEL}* only within ±{SAME:g} point. With fewer than {FEWEST} pairs: *{NOT_TESTABLE}*."""
