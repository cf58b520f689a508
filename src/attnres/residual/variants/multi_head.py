"""AttnRes with several heads: groups of channels, each with depth weights of its own (paper, Table 4)."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from attnres.errors import ConfigError
from attnres.ops.precision import without_autocast
from attnres.ops.stacked import inverse_rms
from attnres.residual.history import AttnResVariant
from attnres.residual.site import DepthSite, Site
from attnres.residual.state import History


@final
@dataclass(frozen=True, kw_only=True)
class MultiHeadAttnRes(AttnResVariant):
    """``s_{i,h} = <w_h, norm(v_i)_h g_h>`` and one softmax per head, over groups of D/H channels.

    The pseudo-query of D numbers is cut into H parts, so there are no more parameters than in AttnRes (paper, Table 4,
    16 heads: 1.752; MHAR, arXiv 2607.27230). Whether the key norm is taken over the whole width or over each group the
    paper leaves open: both are options.

    Parameters, state and moves: as AttnRes in one phase; H weights a source.
    """

    short_name: ClassVar[str] = "multi-head"
    formula: ClassVar[str] = "h_c = sum_i softmax_i(<w_c, norm(v_i)_c g_c>) v_i,c  for each channel group c"
    citation: ClassVar[str] = "Attention Residuals, arXiv 2603.15031, Table 4; MHAR, arXiv 2607.27230"

    heads: int = 4
    """Channel groups H; a divisor of the width."""
    norm_per_head: bool = False
    """Whether the key norm is taken over each group of channels instead of the whole width."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads < 1:
            raise ConfigError(f"heads is {self.heads!r}; allowed is a whole number of 1 or more")

    @property
    def label(self) -> str:
        """Name, form and heads, for tables and legends."""
        return f"{self.form} AttnRes, {self.heads} heads" + (" (normed each)" if self.norm_per_head else "")

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with a zero pseudo-query and a key weight of ones.

        Raises:
            ConfigError: The heads do not divide the width.
        """
        if dim % self.heads:
            raise ConfigError(f"heads is {self.heads}; allowed is a divisor of the width, which is {dim}")
        closes_block = self.closes_block(index, num_sublayers)
        return DepthSite(dim, eps=eps, closes_block=closes_block, device=device, dtype=dtype)

    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """One softmax per head: ``[*batch, 1, sources, heads]``."""
        del state
        assert isinstance(site, DepthSite)
        query = site.folded(stacked.dtype).unflatten(-1, (self.heads, -1))
        with without_autocast(stacked):
            raw = stacked @ torch.block_diag(*query[:, :, None])
        if self.norm_per_head:
            inverse = inverse_rms(stacked.unflatten(-1, (self.heads, -1)), site.eps)
        else:
            inverse = inverse_rms(stacked, site.eps)[..., None]
        return (raw * inverse).softmax(-2)[..., None, :, :]
