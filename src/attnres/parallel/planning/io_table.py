"""What the residual path moves, per token and sublayer: the paper's Table 1 as formulas, and the exact count of a run.

The paper counts in units of one vector of D numbers, with the embedding left out, means over blocks, and for Full
AttnRes key and value apart although they are one tensor. The exact count goes over the schedule site by site, takes
each tensor once, and adds what the paper leaves to the reader: the backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from attnres.residual import DepthAttentionStrategy, PreNorm, Strategy, reads
from attnres.residual.costs import costs
from attnres.residual.history import HistoryStrategy

_NARROWEST = 256
"""From here on a matrix of the width is drawn in no time."""


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One row of the paper's Table 1."""

    scheme: str
    """Name."""
    formula: str
    """Total, in letters."""
    read: Fraction
    """Vectors read."""
    write: Fraction
    """Vectors written."""
    scalars: int = 0
    """Numbers moved besides, which do not grow with D."""
    origin: str = "paper, Table 1"
    """Where the formula is from."""

    @property
    def total(self) -> Fraction:
        """Vectors read and written."""
        return self.read + self.write


def paper_table(num_sublayers: int, sublayers_per_block: Fraction | int, streams: int = 4) -> tuple[TableRow, ...]:
    """Table 1 of the paper for a depth L and blocks of S sublayers, N = L / S of them.

    Args:
        num_sublayers: L.
        sublayers_per_block: S.
        streams: m, of hyper-connections.

    Examples:
        The paper's: L = 128, S = 16, m = 4.

        >>> [str(row.total) for row in paper_table(128, 16)]
        ['3', '34', '130', '24', '103/8', '11/2']
    """
    depth, size, m = Fraction(num_sublayers), Fraction(sublayers_per_block), streams
    blocks = depth / size
    naive_sources = (blocks - 1) / 2 + (size - 1) / size
    return (
        TableRow(scheme="standard residual", formula="3d", read=Fraction(2), write=Fraction(1)),
        TableRow(
            scheme=f"mHC, {m} streams",
            formula="(8m+2)d + 2m^2+4m",
            read=Fraction(5 * m + 1),
            write=Fraction(3 * m + 1),
            scalars=2 * m**2 + 4 * m,
        ),
        TableRow(
            scheme="Full AttnRes, naive",
            formula="(L+2)d",
            read=depth + 1,
            write=Fraction(1),
            origin="derived: key and value apart, mean over l of 2l",
        ),
        TableRow(scheme="Full AttnRes, two phases", formula="(S+N)d", read=size + blocks - 2, write=Fraction(2)),
        TableRow(
            scheme="Block AttnRes, naive",
            formula="(N+3+2(S-1)/S)d",
            read=2 * naive_sources + 2,
            write=Fraction(2),
            origin="derived the same way, with the partial sum's update",
        ),
        TableRow(scheme="Block AttnRes, two phases", formula="(N/S+5)d", read=blocks / size + 3, write=Fraction(2)),
    )


@dataclass(frozen=True, kw_only=True)
class SiteTraffic:
    """What one sublayer's read and write move, in tensors ``[tokens, D]`` of the stream's dtype."""

    forward: float
    """In the forward pass."""
    backward: float
    """In the backward pass, without a second forward pass."""


class Floor(NamedTuple):
    """What a strategy holds and moves at least, in tensors of D numbers per token (see `attnres.residual.costs`)."""

    state: float
    """The most that the state holds between two sublayers."""
    moved: float
    """Per sublayer, mean over the depth."""


@cache
def floor(strategy: Strategy, num_sublayers: int, dim: int) -> Floor:
    """Count by running a strategy on one token, at a width that may be smaller.

    Counts in tensors are the same but for a few numbers per token that are no vectors, and some strategies learn
    matrices of the width, which take minutes to draw.

    Raises:
        ConfigError: The strategy does not fit depth or width.
    """
    while dim % 2 == 0 and dim > _NARROWEST:
        dim //= 2
    counted = costs(strategy, num_sublayers, dim)
    return Floor(state=counted.state, moved=counted.moved)


def traffic(strategy: Strategy, num_sublayers: int, dim: int, *, element_bytes: int) -> tuple[SiteTraffic, ...]:
    """What each sublayer's site moves, and last what the output read does.

    The forward pass is counted as by `attnres.residual.costs`: each tensor once for each read, or once for all reads of
    a block where phase 1 runs ahead (``phases="two"``). The backward pass of ``phases="auto"`` and ``"two"`` goes over
    the finished sources once for each block, with float32 gradients; that of ``"one"`` once for each read.

    Args:
        strategy: Any residual strategy.
        num_sublayers: L.
        dim: D.
        element_bytes: Bytes of a number of the stream; gradients of finished sources have four or more.

    Raises:
        ConfigError: The strategy does not fit depth or width.
    """
    if isinstance(strategy, PreNorm):
        return (*(SiteTraffic(forward=3.0, backward=3.0),) * num_sublayers, SiteTraffic(forward=0.0, backward=0.0))
    if isinstance(strategy, DepthAttentionStrategy):
        return _depth_attention_traffic(strategy, num_sublayers, ratio=max(4, element_bytes) / element_bytes)
    moved = floor(strategy, num_sublayers, dim).moved * num_sublayers / (num_sublayers + 1)
    return (SiteTraffic(forward=moved, backward=2 * moved),) * (num_sublayers + 1)


def _depth_attention_traffic(
    strategy: DepthAttentionStrategy, num_sublayers: int, *, ratio: float
) -> tuple[SiteTraffic, ...]:
    ends = strategy.block_ends(num_sublayers)
    runs = {} if strategy.phases == "one" else _shared_reads(strategy.phase_starts(num_sublayers))
    schedule = reads(num_sublayers, strategy)
    found = []
    for site, sources in enumerate(schedule):
        start, reads_sharing = runs.get(site, (None, 1))
        far = 0 if start is None else sum(end <= start for end in (0, *ends))
        forward = _forward(far if strategy.phases == "two" else 0, len(sources), reads_sharing)
        is_summed = site not in (0, *ends) and site < num_sublayers
        backward = _backward(far, len(sources), reads_sharing, ratio)
        found.append(SiteTraffic(forward=forward + 3.0 * is_summed, backward=backward))
    return tuple(found)


def _shared_reads(starts: Sequence[int]) -> dict[int, tuple[int, int]]:
    """By site, where its pass over the finished sources starts and how many reads share it; not in the first block."""
    return {site: (start, stop - start) for start, stop in pairwise(starts) for site in range(start, stop)}


def _forward(far: int, sources: int, sharing: int) -> float:
    """The sources in and the read out; the far ones ahead of time, with their result out and in again."""
    if sources == 1:
        return 0.0  # the only source is the read
    ahead = far / sharing + 2.0 if far else 0.0
    return ahead + (sources - far) + 1.0


def _backward(far: int, sources: int, sharing: int, ratio: float) -> float:
    """A near source goes in and its gradient out, which is added to the sum: two in, one out; the read's gradient in.

    Far ones, for all reads that share them: themselves in, the float32 sum of their gradients in and out; and for each
    read its gradient and itself.
    """
    if sources == 1:
        return 3.0  # the gradient of the read is added to that of the source
    together = (1.0 + 2.0 * ratio) * far / sharing + 2.0 if far else 0.0
    return together + 5.0 * (sources - far) + 1.0


def exact_mean(rows: Sequence[SiteTraffic]) -> tuple[float, float]:
    """Forward and backward, per sublayer: the mean over the depth, with the output read."""
    depth = len(rows) - 1
    return sum(row.forward for row in rows) / depth, sum(row.backward for row in rows) / depth


def depth_attention_flops(strategy: Strategy, num_sublayers: int, dim: int) -> tuple[float, ...] | None:
    """Operations of each read forward: ``6 n D`` for n sources (mean square, score, mix), and D to add to the sum.

    The softmax over n numbers and the few vectors of the site are left out. None for a strategy whose reads are not
    depth attention.

    Examples:
        >>> from attnres.residual import BlockAttnRes
        >>> depth_attention_flops(BlockAttnRes(sublayers_per_block=2), 3, 10)
        (0.0, 130.0, 120.0, 180.0)
    """
    if not isinstance(strategy, HistoryStrategy):
        return None
    ends = (0, *strategy.block_ends(num_sublayers))
    counts = [len(sources) for sources in reads(num_sublayers, strategy)]
    mixes = [6.0 * n * dim if n > 1 else 0.0 for n in counts]
    adds = [float(dim) if site not in ends and site < num_sublayers else 0.0 for site in range(num_sublayers + 1)]
    return tuple(mix + add for mix, add in zip(mixes, adds, strict=True))
