"""AttnRes with a query that depends on the token through a map of low rank."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final, get_args

import torch
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.ops.precision import without_autocast
from attnres.ops.stacked import inverse_rms, scores
from attnres.residual.history import AttnResVariant
from attnres.residual.site import DepthSite, Site
from attnres.residual.state import History

QueryFrom = Literal["output", "read"]


def cosines(count: int, dim: int, *, first: int = 1) -> Tensor:
    """Orthonormal rows ``[count, dim]``: cosines of the frequencies from ``first`` on, all below ``dim``."""
    place = (torch.arange(dim, device="cpu", dtype=torch.float64) + 0.5) / dim
    frequency = torch.arange(first, first + count, device="cpu", dtype=torch.float64)
    return math.sqrt(2 / dim) * torch.cos(math.pi * frequency[:, None] * place)


@final
class LowRankQuerySite(DepthSite):
    """A site with a pseudo-query, a key weight, and two thin matrices that add a token's own part to the query."""

    def __init__(self, dim: int, *, rank: int, eps: float, closes_block: bool, device: Any, dtype: Any):
        super().__init__(dim, eps=eps, closes_block=closes_block, device=device, dtype=dtype)
        if rank >= dim:
            raise ConfigError(f"rank is {rank}; allowed is less than the width, which is {dim}")
        self.query_down = nn.Parameter(torch.empty(rank, dim, device=device, dtype=dtype))
        self.query_up = nn.Parameter(torch.zeros(dim, rank, device=device, dtype=dtype))
        if not self.query_down.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """As AttnRes; the first matrix has fixed orthonormal rows and the second is zero."""
        super().reset_parameters()
        nn.init.zeros_(self.query_up)
        with torch.no_grad():
            self.query_down.copy_(cosines(*self.query_down.shape))

    def query(self, hidden: Tensor) -> Tensor:
        """``(w + B A norm(hidden)) g`` for each token, in the dtype of ``hidden``."""
        wide = hidden.dtype
        normed = hidden * inverse_rms(hidden, self.eps)[..., None]
        with without_autocast(hidden):
            low = normed @ self.query_down.to(wide).mT
            query = self.pseudo_query.to(wide) + low @ self.query_up.to(wide).mT
        return query * self.key_weight.to(wide)


def check_rank(rank: Any) -> None:
    """Raise `ConfigError` unless the rank is a whole number of 1 or more."""
    if rank < 1:
        raise ConfigError(f"rank is {rank!r}; allowed is a whole number of 1 or more")


@final
@dataclass(frozen=True, kw_only=True)
class LowRankQuery(AttnResVariant):
    """``q = w_l + B_l A_l norm(x)``: the pseudo-query, and a part of low rank that the token decides.

    The cheap form of the input-dependent query, with 2 r D numbers a site in place of D^2. A starts with fixed
    orthonormal rows and B at zero, so the model starts as AttnRes does, and B gets a gradient at once.

    Parameters: 2 D + 2 r D a site. State: as AttnRes, and the last read with ``query_from="read"``, where a write
    computes its site's read once more. Moves: as AttnRes in one phase, and the matrices.
    """

    short_name: ClassVar[str] = "low-rank-query"
    formula: ClassVar[str] = "h = sum_i softmax_i(<w + B A norm(x), norm(v_i) g>) v_i;  x the newest output"
    citation: ClassVar[str] = "this project; cf. Attention Residuals, arXiv 2603.15031, Table 4, and x-transformers"

    rank: int = 8
    """Rank r of the part of the query that depends on the token."""
    query_from: QueryFrom = "output"
    """``"output"``: x is the newest source. ``"read"``: what the sublayer before read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rank(self.rank)
        if self.query_from not in get_args(QueryFrom):
            raise ConfigError(f'query_from is {self.query_from!r}; allowed are "output" and "read"')

    @property
    def label(self) -> str:
        """Name, form and rank, for tables and legends."""
        return f"{self.form} AttnRes, rank-{self.rank} query" + (
            " (from the read)" if self.query_from == "read" else ""
        )

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with a zero pseudo-query, a key weight of ones, and a low-rank part that is zero.

        Raises:
            ConfigError: The rank is not below the width.
        """
        closes_block = self.closes_block(index, num_sublayers)
        return LowRankQuerySite(dim, rank=self.rank, eps=eps, closes_block=closes_block, device=device, dtype=dtype)

    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """Softmax of the scores against the token's own query."""
        assert isinstance(site, LowRankQuerySite)
        hidden = stacked[..., -1, :] if state.last_read is None else state.last_read.to(stacked.dtype)
        return scores(stacked, site.query(hidden), site.eps).softmax(-1)[..., None, :, None]

    def write(self, state: History, site: Site, output: Tensor) -> History:
        """As of AttnRes; with ``query_from="read"`` what was read stays in the state for the next query."""
        written = super().write(state, site, output)
        return written if self.query_from == "output" else replace(written, last_read=self.read(state, site))
