"""Means over seeds of curves that were not all sampled at the same places.

Validation happens at the same tokens in every run but at different seconds, and a stopped run is shorter. Everything
is brought to one grid by linear interpolation, and only where every seed has data.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnres.analysis.runs import Array


@dataclass(frozen=True, kw_only=True)
class Band:
    """A curve averaged over seeds, with the smallest and the largest seed; one entry per place."""

    x: Array
    """Where."""
    mean: Array
    """Mean over seeds."""
    low: Array
    """Smallest seed."""
    high: Array
    """Largest seed."""


def band(curves: Sequence[tuple[Array, Array]]) -> Band:
    """Average curves over seeds.

    Args:
        curves: One pair (x, y) per seed, x increasing.

    Returns:
        The band over the x of the first curve that all curves cover; empty if there is none.
    """
    curves = [(x, y) for x, y in curves if len(x)]
    if not curves:
        nothing = np.empty(0)
        return Band(x=nothing, mean=nothing, low=nothing, high=nothing)
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    inside = curves[0][0][(curves[0][0] >= start) & (curves[0][0] <= end)]
    grid = np.union1d(inside, [start, end]) if start <= end else np.empty(0)
    values = np.stack([np.interp(grid, x, y) for x, y in curves])
    return Band(x=grid, mean=values.mean(axis=0), low=values.min(axis=0), high=values.max(axis=0))


def smooth(values: Array, window: int) -> Array:
    """Centred moving mean; at the ends over the part of the window that exists."""
    if window <= 1 or len(values) <= 1:
        return values
    ones = np.ones(min(window, len(values)))
    return np.convolve(values, ones, mode="same") / np.convolve(np.ones(len(values)), ones, mode="same")


def thin(x: Array, y: Array, most: int) -> tuple[Array, Array]:
    """Keep at most about this many points, the first and the last among them; for lines already smoothed."""
    if len(x) <= most:
        return x, y
    keep = np.unique(np.linspace(0, len(x) - 1, most).round().astype(int))
    return x[keep], y[keep]
