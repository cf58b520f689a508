"""Variants whose reads are depth attention as it is, by the fused operators, over other sources than the outputs."""

from dataclasses import dataclass

from attnres.residual.depth_attention import DepthAttentionStrategy
from attnres.residual.full import READS_PER_PHASE
from attnres.residual.history import AttnResVariant


@dataclass(frozen=True, kw_only=True)
class FusedVariant(DepthAttentionStrategy, AttnResVariant):
    """Base of the variants that change what is written, and read as AttnRes does, in one phase or two."""

    def phase_starts(self, num_sublayers: int) -> tuple[int, ...]:
        """The ends of blocks; every few sublayers where each output is a source of its own, as in Full AttnRes."""
        ends = self.block_ends(num_sublayers)
        if self.sublayers_per_block > 1:
            return ends
        return (*ends[READS_PER_PHASE - 1 :: READS_PER_PHASE], num_sublayers + 1)
