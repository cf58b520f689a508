"""The schedule of reads and writes as a pure function of depth and strategy.

What a read sees is decided here and nowhere else: the strategies take the sites that close a block from the same
function from which the printed schedule is made, so a schedule that prints right also runs right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attnres.errors import ConfigError

if TYPE_CHECKING:
    from attnres.residual.strategy import Strategy

Remainder = Literal["tail", "balanced"]


@dataclass(frozen=True)
class Source:
    """What one source is a sum of: the embedding, a run of consecutive sublayer outputs, or both."""

    embedding: bool
    """Whether the token embedding is part of the sum."""
    first: int
    """First sublayer whose output is part of the sum."""
    stop: int
    """One past the last sublayer; equal to ``first`` when there is none."""

    def __str__(self) -> str:
        parts = ["E"] if self.embedding else []
        count = self.stop - self.first
        if count == 1:
            parts.append(f"c{self.first}")
        elif count == 2:
            parts.append(f"c{self.first}+c{self.stop - 1}")
        elif count > 2:
            parts.append(f"c{self.first}+..+c{self.stop - 1}")
        return "+".join(parts)


EMBEDDING = Source(embedding=True, first=0, stop=0)
"""Source 0 of every AttnRes read: the token embedding by itself, never part of a block sum."""


def reads(num_sublayers: int, strategy: "Strategy") -> tuple[tuple[Source, ...], ...]:
    """For each site, which sources its read sees, oldest first.

    Args:
        num_sublayers: Number of sublayers (attention and MLP each count as one).
        strategy: Any residual strategy.

    Returns:
        ``num_sublayers + 1`` tuples: the input of each sublayer, then the output read.

    Raises:
        ConfigError: There is no sublayer, or the strategy does not fit the depth.

    Examples:
        >>> from attnres.residual import BlockAttnRes
        >>> for sources in reads(3, BlockAttnRes(sublayers_per_block=2)):
        ...     print(*sources, sep=", ")
        E
        E, c0
        E, c0+c1
        E, c0+c1, c2
    """
    if num_sublayers < 1:
        raise ConfigError(f"num_sublayers is {num_sublayers}; allowed is 1 or more")
    return tuple(strategy.sources(site, num_sublayers) for site in range(num_sublayers + 1))


def block_ends(
    num_sublayers: int, *, sublayers_per_block: int | None, num_blocks: int | None, remainder: Remainder
) -> tuple[int, ...]:
    """Sublayer counts at which a block is complete; the last one is ``num_sublayers``.

    With ``remainder="tail"`` every block but the last has the same length ``S`` and the last takes what is left (paper,
    section 3). With ``"balanced"`` the lengths differ by at most one, longer blocks first.

    Raises:
        ConfigError: ``num_blocks`` exceeds the number of sublayers, or cannot be had with equal blocks and a tail.

    Examples:
        >>> block_ends(7, sublayers_per_block=3, num_blocks=None, remainder="tail")
        (3, 6, 7)
        >>> block_ends(7, sublayers_per_block=3, num_blocks=None, remainder="balanced")
        (3, 5, 7)
    """
    if sublayers_per_block is not None:
        count = -(-num_sublayers // sublayers_per_block)
        length = sublayers_per_block
    else:
        assert num_blocks is not None  # BlockAttnRes takes exactly one of the two
        if num_blocks > num_sublayers:
            raise ConfigError(f"num_blocks is {num_blocks}; allowed is 1 to {num_sublayers} (the number of sublayers)")
        count = num_blocks
        length = -(-num_sublayers // num_blocks)
    if remainder == "balanced":
        short, extra = divmod(num_sublayers, count)
        return tuple(short * n + min(n, extra) for n in range(1, count + 1))
    ends = tuple(min(length * n, num_sublayers) for n in range(1, count + 1))
    if len(set(ends)) < count:
        possible = len(set(ends))
        raise ConfigError(
            f"num_blocks is {num_blocks}, but {num_sublayers} sublayers in blocks of {length} make {possible}; "
            f'use num_blocks={possible} or remainder="balanced"'
        )
    return ends


def block_sources(site: int, ends: Sequence[int]) -> tuple[Source, ...]:
    """Sources of a read when blocks are complete after ``ends`` sublayers (paper, Eq. 6).

    The embedding, every block complete before ``site``, and, unless ``site`` starts a block, the partial sum.
    """
    starts = (0, *ends)
    finished = [Source(False, first, stop) for first, stop in zip(starts, ends, strict=False) if stop <= site]
    open_from = finished[-1].stop if finished else 0
    partial = [Source(False, open_from, site)] if site > open_from else []
    return (EMBEDDING, *finished, *partial)
