"""Full AttnRes with a query that is projected from the token's hidden state (paper, Table 4)."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final, get_args

import torch
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.ops.precision import without_autocast
from attnres.ops.stacked import inverse_rms, scores
from attnres.residual.history import AttnResVariant
from attnres.residual.site import Site
from attnres.residual.state import History

QueryFrom = Literal["output", "read"]


@final
class ProjectedQuerySite(Site):
    """A site with a matrix ``[dim, dim]`` that makes the query (zero at start) and a key weight (one at start)."""

    def __init__(self, dim: int, *, eps: float, closes_block: bool, device: Any, dtype: Any):
        super().__init__(closes_block=closes_block)
        self.eps = eps
        self.query_weight = nn.Parameter(torch.zeros(dim, dim, device=device, dtype=dtype))
        self.key_weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the query matrix to zeros and the key weight to ones."""
        nn.init.zeros_(self.query_weight)
        nn.init.ones_(self.key_weight)


@final
@dataclass(frozen=True, kw_only=True)
class InputDependentQuery(AttnResVariant):
    """``q = W_l norm(x)`` in place of the learned vector ``w_l``; the rest is AttnRes (paper, Table 4, 1.731).

    The paper says that the query is projected from the current hidden state by one matrix per layer. Which state, and
    whether it is normalised first, it leaves open: both are options. W starts at zero, so the model starts as AttnRes
    does. Reads can no longer be taken ahead (no two phases).

    Parameters: D^2 + D a site. State: as AttnRes, and the last read with ``query_from="read"``, where a write computes
    its site's read once more. Moves: as AttnRes, and the matrix.
    """

    short_name: ClassVar[str] = "input-dependent"
    formula: ClassVar[str] = "h = sum_i softmax_i(<W norm(x), norm(v_i) g>) v_i;  x the newest output"
    citation: ClassVar[str] = "Attention Residuals, arXiv 2603.15031, Table 4"

    query_from: QueryFrom = "output"
    """``"output"``: the newest source. ``"read"``: what the sublayer before read."""
    norm_query: bool = True
    """Whether the state is normalised (without a weight) before the projection."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.query_from not in get_args(QueryFrom):
            raise ConfigError(f'query_from is {self.query_from!r}; allowed are "output" and "read"')

    @property
    def label(self) -> str:
        """Name and form, for tables and legends."""
        return f"{self.form} AttnRes, input-dependent query" + (" (from the read)" if self.query_from == "read" else "")

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with a zero matrix and a key weight of ones."""
        closes_block = self.closes_block(index, num_sublayers)
        return ProjectedQuerySite(dim, eps=eps, closes_block=closes_block, device=device, dtype=dtype)

    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """Softmax of the scores against the token's own query."""
        assert isinstance(site, ProjectedQuerySite)
        hidden = stacked[..., -1, :] if state.last_read is None else state.last_read.to(stacked.dtype)
        if self.norm_query:
            hidden = hidden * inverse_rms(hidden, site.eps)[..., None]
        with without_autocast(stacked):
            query = hidden @ site.query_weight.to(stacked.dtype).mT * site.key_weight.to(stacked.dtype)
        return scores(stacked, query, site.eps).softmax(-1)[..., None, :, None]

    def write(self, state: History, site: Site, output: Tensor) -> History:
        """As of AttnRes; with ``query_from="read"`` what was read stays in the state for the next query."""
        written = super().write(state, site, output)
        return written if self.query_from == "output" else replace(written, last_read=self.read(state, site))
