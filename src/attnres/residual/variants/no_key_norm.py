"""AttnRes without the key norm: a loud source wins by being loud (paper, Table 4)."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from attnres.ops.stacked import scores
from attnres.residual.history import AttnResVariant
from attnres.residual.site import Site
from attnres.residual.state import History


@final
class QuerySite(Site):
    """A site with a pseudo-query, zero at start, and no key weight."""

    def __init__(self, dim: int, *, closes_block: bool, device: Any, dtype: Any):
        super().__init__(closes_block=closes_block)
        self.pseudo_query = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the pseudo-query to zeros."""
        nn.init.zeros_(self.pseudo_query)


@final
@dataclass(frozen=True, kw_only=True)
class NoKeyNorm(AttnResVariant):
    """``s_i = <w, v_i>``: the score is taken of the source as it is (paper, Table 4: Full 1.743, Block 1.750).

    Parameters: D a site. State and moves: as AttnRes in one phase.
    """

    short_name: ClassVar[str] = "no-key-norm"
    formula: ClassVar[str] = "h = sum_i softmax_i(<w, v_i>) v_i"
    citation: ClassVar[str] = "Attention Residuals, arXiv 2603.15031, Table 4"

    @property
    def label(self) -> str:
        """Name and form, for tables and legends."""
        return f"{self.form} AttnRes, no key norm"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with a zero pseudo-query."""
        del eps
        closes_block = self.closes_block(index, num_sublayers)
        return QuerySite(dim, closes_block=closes_block, device=device, dtype=dtype)

    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """Softmax of the raw dot products."""
        del state
        assert isinstance(site, QuerySite)
        return scores(stacked, site.pseudo_query, None).softmax(-1)[..., None, :, None]
