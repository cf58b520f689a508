"""Block AttnRes with blocks of any lengths."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, final

from attnres.errors import ConfigError
from attnres.residual.depth_attention import DepthAttentionStrategy


@final
@dataclass(frozen=True, kw_only=True)
class CutBlock(DepthAttentionStrategy):
    """Block AttnRes whose blocks end where it is told; the reads are those of Block AttnRes, by the same operators.

    Parameters, state and moves: as Block AttnRes with that many blocks. Starts as PreNorm's function, as it does.
    """

    short_name: ClassVar[str] = "cut-block"
    formula: ClassVar[str] = "h = sum_n softmax_n(<w, norm(b_n) g>) b_n;  b_n the sum of the outputs between two cuts"
    citation: ClassVar[str] = "Attention Residuals, arXiv 2603.15031, Eq. 5-6; cuts: this project"

    boundaries: tuple[int, ...] = ()
    """Sublayer counts after which a block closes, rising; the last block closes at the end by itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = isinstance(self.boundaries, tuple) and all(type(cut) is int for cut in self.boundaries)
        if not whole or any(before >= after for before, after in pairwise((0, *self.boundaries))):
            raise ConfigError(f"boundaries is {self.boundaries!r}; allowed are whole numbers of 1 or more that rise")

    @property
    def label(self) -> str:
        """Name and cuts, for tables and legends."""
        return f"Block AttnRes (cuts {'+'.join(map(str, self.boundaries)) or 'none'})"

    def block_ends(self, num_sublayers: int) -> tuple[int, ...]:
        """Sublayer counts at which a block is complete.

        Raises:
            ConfigError: A cut is at the end or after it.
        """
        if self.boundaries and self.boundaries[-1] >= num_sublayers:
            allowed = f"below {num_sublayers} (the number of sublayers)"
            raise ConfigError(f"boundaries is {self.boundaries!r}; allowed are whole numbers {allowed}")
        return (*self.boundaries, num_sublayers)

    def phase_starts(self, num_sublayers: int) -> tuple[int, ...]:
        """The end of each block, as of Block AttnRes."""
        return self.block_ends(num_sublayers)
