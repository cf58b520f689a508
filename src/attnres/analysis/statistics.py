"""The few statistics a comparison needs: paired differences with Student's t interval, and loss at equal time.

Runs of two arms that share a seed share their initial weights and the order of their data, so most of the noise between
seeds is common to both and cancels in the difference. Intervals are therefore taken over paired differences, never over
the arms' own means. Student's t is computed here for whole degrees of freedom: one short formula does not justify
a dependency on scipy.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median, stdev

import numpy as np

from attnres.analysis.runs import Curve

CONFIDENCE = 0.95
"""Coverage of every interval in tables and reports."""


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Mean of ``arm - baseline`` over the seeds that both have."""

    mean: float
    """Mean difference; below zero the arm has the lower value."""
    half_width: float | None
    """Half the width of the 95 % interval; ``None`` for a single pair, which has none."""
    pairs: int
    """Number of seeds that both arms have."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Lower and upper end of the 95 % interval."""
        return None if self.half_width is None else (self.mean - self.half_width, self.mean + self.half_width)


def paired_difference(arm: Mapping[int, float], baseline: Mapping[int, float]) -> PairedDifference | None:
    """Compare two arms seed by seed.

    The interval is ``mean +- t(0.975, n - 1) * s / sqrt(n)`` over the ``n`` differences with standard deviation ``s``.

    Args:
        arm: Value of the arm by seed.
        baseline: Value of the baseline by seed.

    Returns:
        ``None`` if the two have no seed in common.
    """
    differences = [arm[seed] - baseline[seed] for seed in arm if seed in baseline]
    if not differences:
        return None
    count = len(differences)
    half_width = None
    if count > 1:
        half_width = student_t_quantile((1 + CONFIDENCE) / 2, count - 1) * stdev(differences) / math.sqrt(count)
    return PairedDifference(mean=fmean(differences), half_width=half_width, pairs=count)


def paired_ratio(arm: Mapping[int, float], baseline: Mapping[int, float]) -> float | None:
    """Return the median over shared seeds of ``arm / baseline``; ``None`` if there is no such seed."""
    ratios = [arm[seed] / baseline[seed] for seed in arm if baseline.get(seed)]
    return median(ratios) if ratios else None


def loss_at_seconds(curve: Curve, seconds: float) -> float | None:
    """Return the loss at a training time, linear between the neighbouring evaluations.

    Returns:
        ``None`` outside the time that the curve covers: nothing is extrapolated.
    """
    if not len(curve) or not curve.seconds[0] <= seconds <= curve.seconds[-1]:
        return None
    return float(np.interp(seconds, curve.seconds, curve.loss))


def student_t_quantile(probability: float, degrees: int) -> float:
    """Return the value that a Student t variable stays below with this probability.

    Found by bisection on the angle ``atan(t / sqrt(degrees))``, which keeps the search bounded.

    Args:
        probability: In (0, 1).
        degrees: Degrees of freedom, a whole number from 1.

    Raises:
        ValueError: An argument is outside its range.
    """
    if not 0 < probability < 1 or degrees < 1:
        raise ValueError(f"needs 0 < probability < 1 and degrees >= 1; got {probability} and {degrees}")
    if probability < 0.5:
        return -student_t_quantile(1 - probability, degrees)
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _central_mass(middle, degrees) < 2 * probability - 1 else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _central_mass(angle: float, degrees: int) -> float:
    """Return P(|T| <= sqrt(degrees) * tan(angle)); a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
