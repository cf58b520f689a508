"""Full AttnRes: each sublayer attends over the embedding and every earlier output."""

from dataclasses import dataclass
from typing import ClassVar, final

from attnres.residual.depth_attention import DepthAttentionStrategy

READS_PER_PHASE = 8
"""Reads that share one phase 1. More of them spread its cost further, but leave more near sources to each read."""


@final
@dataclass(frozen=True, kw_only=True)
class FullAttnRes(DepthAttentionStrategy):
    """Full Attention Residuals (paper, Eq. 1-4): every sublayer output is a source of its own.

    ``h_l = sum_{i<l} softmax_i(<w_l, rms_norm(v_i) * g_l>) v_i`` with ``v_0`` the embedding and ``v_i`` the output of
    sublayer ``i``. The state grows by one tensor per sublayer.
    """

    short_name: ClassVar[str] = "full"
    formula: ClassVar[str] = "h = sum_i softmax_i(<w, norm(v_i) g>) v_i"
    citation: ClassVar[str] = "Attention Residuals, arXiv 2603.15031, Eq. 1-4"

    @property
    def label(self) -> str:
        """Name for tables and legends."""
        return "Full AttnRes"

    def block_ends(self, num_sublayers: int) -> tuple[int, ...]:
        """Every sublayer is a block of its own."""
        return tuple(range(1, num_sublayers + 1))

    def closes_block(self, site: int, num_sublayers: int) -> bool:
        """Always, but for the output read, which is not followed by a sublayer."""
        return site < num_sublayers

    def phase_starts(self, num_sublayers: int) -> tuple[int, ...]:
        """Every few sublayers: Full AttnRes has no blocks of its own to schedule by (paper, appendix B)."""
        return (*range(READS_PER_PHASE, num_sublayers + 1, READS_PER_PHASE), num_sublayers + 1)
