"""The paper's formulas for what a pipeline sends, in units of one source ``[tokens, dim]`` (section 4.1, Eq. 7-8).

They count finished block sums on the way forward, with blocks spread evenly: each of the C = P V stages finishes N_p of
them. The embedding and the partial sum come on top; the backward pass sends one gradient for each tensor sent forward.
"""

from fractions import Fraction


def comm_naive(ranks: int, virtual: int, blocks_per_stage: Fraction | int) -> Fraction:
    """``C (C - 1) / 2 * N_p`` with ``C = P V``: every hop sends all block sums so far."""
    stages = ranks * virtual
    return Fraction(stages * (stages - 1), 2) * blocks_per_stage


def comm_cached(ranks: int, virtual: int, blocks_per_stage: Fraction | int) -> Fraction:
    """``P (P - 1) / 2 * N_p + (V - 1) P^2 N_p``: a rank keeps what it was sent."""
    return (Fraction(ranks * (ranks - 1), 2) + (virtual - 1) * ranks**2) * blocks_per_stage


def comm_own_reused(ranks: int, virtual: int, blocks_per_stage: Fraction | int) -> Fraction:
    """``P (P - 1) / 2 * N_p + (V - 1) P (P - 1) N_p``: a rank keeps what it made itself as well. Not in the paper."""
    return (Fraction(ranks * (ranks - 1), 2) + (virtual - 1) * ranks * (ranks - 1)) * blocks_per_stage


def peak_naive(ranks: int, virtual: int, blocks_per_stage: Fraction | int) -> Fraction:
    """``(C - 1) N_p``: what the last hop sends."""
    return Fraction(ranks * virtual - 1) * blocks_per_stage


def peak_cached(ranks: int, virtual: int, blocks_per_stage: Fraction | int) -> Fraction:
    """``P N_p``, or ``(P - 1) N_p`` with one stage on each rank: the largest hop no longer grows with the depth."""
    return Fraction(ranks if virtual > 1 else ranks - 1) * blocks_per_stage
