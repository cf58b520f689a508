"""Block AttnRes: each sublayer attends over the embedding, the finished block sums and the running partial sum."""

from dataclasses import dataclass
from typing import ClassVar, final

from attnres.errors import ConfigError
from attnres.residual.depth_attention import DepthAttentionStrategy
from attnres.residual.schedule import Remainder, block_ends


@final
@dataclass(frozen=True, kw_only=True)
class BlockAttnRes(DepthAttentionStrategy):
    """Block Attention Residuals (paper, Eq. 5-6): outputs are summed within blocks, attention runs over the sums.

    The unit is the sublayer: one attention or one MLP. A Kimi K3 block of 12 decoder layers is
    ``sublayers_per_block=24``; ``sublayers_per_block=1`` is Full AttnRes. Blocks may have odd length or be longer than
    the model, and the last may be short.

    Raises:
        ConfigError: Both or neither of ``sublayers_per_block`` and ``num_blocks`` are given, or one is below 1.
    """

    short_name: ClassVar[str] = "block"
    formula: ClassVar[str] = "h = sum_n softmax_n(<w, norm(b_n) g>) b_n;  b_n the sum of a block's outputs"
    citation: ClassVar[str] = "Attention Residuals, arXiv 2603.15031, Eq. 5-6"

    sublayers_per_block: int | None = None
    """Sublayers (not decoder layers) summed into one source. Give this or ``num_blocks``."""
    num_blocks: int | None = None
    """Number of blocks, whatever the depth. Give this or ``sublayers_per_block``."""
    remainder: Remainder = "tail"
    """Where a depth that does not divide goes: ``"tail"`` shortens the last block (paper), ``"balanced"`` spreads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.sublayers_per_block is None) == (self.num_blocks is None):
            raise ConfigError(
                f"sublayers_per_block is {self.sublayers_per_block} and num_blocks is {self.num_blocks}; "
                "give exactly one of the two"
            )
        for name in ("sublayers_per_block", "num_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value!r}; allowed is a whole number of 1 or more")
        if self.remainder not in ("tail", "balanced"):
            raise ConfigError(f'remainder is {self.remainder!r}; allowed are "tail" and "balanced"')

    @property
    def label(self) -> str:
        """Name and block size, for tables and legends."""
        size = f"S={self.sublayers_per_block}" if self.num_blocks is None else f"N={self.num_blocks}"
        return f"Block AttnRes ({size})"

    def block_ends(self, num_sublayers: int) -> tuple[int, ...]:
        """Sublayer counts at which a block is complete."""
        return block_ends(
            num_sublayers,
            sublayers_per_block=self.sublayers_per_block,
            num_blocks=self.num_blocks,
            remainder=self.remainder,
        )

    def phase_starts(self, num_sublayers: int) -> tuple[int, ...]:
        """The end of each block; the output read after the last one is a single read, and not in two phases."""
        return self.block_ends(num_sublayers)
