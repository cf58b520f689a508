"""PreNorm with a gate at every read that lets AttnRes in."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.ops import depth_attention
from attnres.ops.precision import result_dtype, working_dtype
from attnres.residual.history import AttnResVariant
from attnres.residual.schedule import Source
from attnres.residual.site import DepthSite, Site
from attnres.residual.state import History
from attnres.residual.strategy import stream_dtype
from attnres.residual.variants.low_rank_query import cosines
from attnres.residual.weights import keep, rows


@final
class GatedSite(DepthSite):
    """A site with a gate, zero at start, and a pseudo-query that is not."""

    def __init__(self, dim: int, *, place: int, length: float, eps: float, closes_block: bool, device: Any, dtype: Any):
        super().__init__(dim, eps=eps, closes_block=closes_block, device=device, dtype=dtype)
        self.place, self.length = place, length
        self.gate = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
        if not self.gate.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """A gate of zero, a key weight of ones, and a pseudo-query of the given length, its own for each site."""
        super().reset_parameters()
        nn.init.zeros_(self.gate)
        dim = len(self.pseudo_query)
        with torch.no_grad():
            self.pseudo_query.copy_(self.length * cosines(1, dim, first=1 + self.place % max(1, dim - 1))[0])


@final
@dataclass(frozen=True, kw_only=True)
class GatedAttnRes(AttnResVariant):
    """``h = x + a_l (read - x)`` with x the running residual sum and ``a_l`` a scalar for each site, zero at start.

    The model starts as PreNorm exactly, bit for bit, whatever the queries are. But zero gates *and* zero queries would
    never move: the read is then the residual sum over its number of sources, or the sum itself, so the gate has no
    gradient that the norm after it lets through, and the query has none because the gate is zero. So pseudo-queries
    start away from zero: each is a cosine over the channels of length ``query_length``, another frequency at each
    site. The gates then have a gradient in the first step and the queries from the second on.

    Parameters: 2 D + 1 a site. State: as AttnRes, and x. Moves: as AttnRes in one phase, and 4 tensors more a sublayer.
    """

    tensors_at_start: ClassVar[int] = 2
    short_name: ClassVar[str] = "gated"
    formula: ClassVar[str] = "h = x + a (sum_i softmax_i(<w, norm(v_i) g>) v_i - x);  x <- x + v"
    citation: ClassVar[str] = "this project; cf. Attention Residuals, arXiv 2603.15031"

    query_length: float = 1.0
    """Euclidean length of the pseudo-queries at start, which is about the spread of their scores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.query_length < float("inf"):
            raise ConfigError(f"query_length is {self.query_length!r}; allowed is a number above 0")

    @property
    def label(self) -> str:
        """Name and form, for tables and legends."""
        return f"{self.form} AttnRes, gated"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with a gate of zero, a key weight of ones, and a pseudo-query of the given length."""
        options = {"eps": eps, "closes_block": self.closes_block(index, num_sublayers), "device": device}
        return GatedSite(dim, place=index, length=self.query_length, dtype=dtype, **options)

    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """As of AttnRes, and the running sum of everything."""
        return (*super().sources(site, num_sublayers), Source(embedding=True, first=0, stop=site))

    def start(self, embedding: Tensor) -> History:
        """The embedding is the first source and the running sum."""
        return History((embedding,), extra=(embedding,))

    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """The softmax values of the read behind the gate."""
        del state
        assert isinstance(site, GatedSite)
        sources = stacked.unbind(-2)
        read = depth_attention(sources, site.pseudo_query, site.key_weight, eps=site.eps, return_weights=True)
        assert not isinstance(read, Tensor)
        assert read.depth_weights is not None
        return read.depth_weights[..., None, :, None]

    def read(self, state: History, site: Site) -> Tensor:
        """The running sum, and as much of the difference to the read as the gate lets in; rounded once."""
        assert isinstance(site, GatedSite)
        wide, scale = working_dtype(state.sources), self._out_scale(state)
        query, weight = site.pseudo_query, site.key_weight
        mixed = depth_attention(state.sources, query, weight, eps=site.eps, out_scale=scale, dtype=wide)
        hidden = state.extra[0].to(wide)
        gated = hidden + site.gate.to(wide) * (mixed - hidden)
        return gated.to(result_dtype((*state.sources, state.extra[0]), stream_dtype(hidden)))

    def write(self, state: History, site: Site, output: Tensor) -> History:
        """As of AttnRes, and the running sum."""
        written = super().write(state, site, output)
        return History(written.finished, written.partial, extra=(state.extra[0] + output,))

    def read_weights(self, state: History, site: Site) -> Tensor:
        """The gate times the weights of the read, and the rest of one for the running sum."""
        assert isinstance(site, GatedSite)
        weights = super().read_weights(state, site)
        gate = site.gate.to(weights.dtype)
        rest = (1 - gate).expand(*weights.shape[:-2], 1, 1)
        return torch.cat([gate * weights, rest], -2)

    def write_weights(self, state: History, site: Site, output: Tensor) -> Tensor:
        """As of AttnRes, and the output is added to the running sum."""
        del site
        done, open_ = len(state.finished), state.partial is not None
        columns = done + open_ + 2
        block = {done: 1.0, columns - 1: 1.0} if open_ else {columns - 1: 1.0}
        return rows(columns, [*keep(done), block, {columns - 2: 1.0, columns - 1: 1.0}], output)
