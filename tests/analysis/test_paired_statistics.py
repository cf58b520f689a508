"""Statistics against known values and worked examples."""

import math

import numpy as np
import pytest

from attnres.analysis.curves import band, smooth, thin
from attnres.analysis.runs import Curve
from attnres.analysis.statistics import loss_at_seconds, paired_difference, paired_ratio, student_t_quantile


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [  # from printed tables of Student's t
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.975, 3, 3.18245),
        (0.975, 4, 2.77645),
        (0.975, 5, 2.57058),
        (0.975, 9, 2.26216),
        (0.975, 10, 2.22814),
        (0.975, 30, 2.04227),
        (0.975, 1000, 1.96234),
        (0.95, 7, 1.89458),
        (0.995, 6, 3.70743),
        (0.5, 4, 0.0),
        (0.025, 2, -4.30265),
    ],
)
def test_student_t_quantiles_equal_the_printed_tables(probability, degrees, expected):
    assert student_t_quantile(probability, degrees) == pytest.approx(expected, rel=3e-6, abs=1e-9)


@pytest.mark.parametrize(("probability", "degrees"), [(0.0, 3), (1.0, 3), (0.9, 0)])
def test_a_quantile_outside_its_range_is_refused(probability, degrees):
    with pytest.raises(ValueError, match="needs 0 < probability < 1"):
        student_t_quantile(probability, degrees)


def test_paired_difference_equals_the_worked_example():
    # differences -0.1, -0.2, -0.3: mean -0.2, s = 0.1, half width 4.30265 * 0.1 / sqrt(3)
    difference = paired_difference({0: 2.9, 1: 3.8, 2: 0.7}, {0: 3.0, 1: 4.0, 2: 1.0})
    assert difference is not None
    assert difference.mean == pytest.approx(-0.2)
    assert difference.half_width == pytest.approx(4.30265 * 0.1 / math.sqrt(3), rel=1e-5)
    assert difference.interval == pytest.approx((-0.2 - 0.248414, -0.2 + 0.248414), abs=1e-5)
    assert difference.pairs == 3


def test_only_shared_seeds_are_paired():
    difference = paired_difference({0: 1.0, 5: 9.0}, {0: 1.5, 6: 0.0})
    assert difference is not None
    assert (difference.mean, difference.half_width, difference.interval, difference.pairs) == (-0.5, None, None, 1)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_paired_ratio_is_the_median_over_seeds():
    assert paired_ratio({0: 50.0, 1: 90.0, 2: 10.0}, {0: 100.0, 1: 100.0, 2: 100.0}) == 0.5
    assert paired_ratio({0: 1.0}, {}) is None


def test_loss_at_a_time_is_linear_between_evaluations_and_never_extrapolated():
    curve = Curve(
        steps=np.arange(3.0), tokens=np.arange(3.0), loss=np.array([9.0, 5.0, 4.0]), seconds=np.array([1, 3, 5.0])
    )
    assert loss_at_seconds(curve, 2.5) == 6.0
    assert loss_at_seconds(curve, 5.0) == 4.0
    assert loss_at_seconds(curve, 0.5) is None
    assert loss_at_seconds(curve, 5.1) is None


def test_a_band_covers_only_what_all_seeds_have():
    x = np.array([0.0, 1.0, 2.0, 3.0])
    result = band([(x, x), (x[:3], 3 * x[:3]), (np.empty(0), np.empty(0))])
    assert result.x.tolist() == [0, 1, 2]
    assert result.mean.tolist() == [0, 2, 4]
    assert result.low.tolist() == [0, 1, 2]
    assert result.high.tolist() == [0, 3, 6]
    assert len(band([]).x) == 0


def test_smoothing_keeps_a_constant_and_averages_a_spike():
    assert smooth(np.full(7, 2.0), 3).tolist() == [2.0] * 7
    assert smooth(np.array([0.0, 0, 3, 0, 0]), 3).tolist() == [0, 1, 1, 1, 0]


def test_thinning_keeps_both_ends():
    x, y = thin(np.arange(1000.0), np.arange(1000.0), 10)
    assert len(x) == 10
    assert (x[0], x[-1], y[-1]) == (0, 999, 999)
