"""Block AttnRes with a query that depends on the token and still lets phase 1 run ahead."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, final, get_args

import torch
from torch import Tensor

from attnres.errors import ConfigError
from attnres.ops import PartialSoftmax
from attnres.ops.precision import result_dtype, without_autocast
from attnres.ops.stacked import inverse_rms, scores, stack
from attnres.residual.history import AttnResVariant
from attnres.residual.site import DepthSite, Site
from attnres.residual.state import Ahead, History
from attnres.residual.strategy import stream_dtype
from attnres.residual.variants.low_rank_query import LowRankQuerySite, check_rank

LaggedPhases = Literal["one", "two"]


@final
@dataclass(frozen=True, kw_only=True)
class BlockLaggedQuery(AttnResVariant):
    """``q_l = w_l + B_l A_l norm(x)`` where x is, for all reads of a block, the source that was newest at its start.

    A query made of the newest output forbids two phases: it is not there when the block begins. The source finished
    last (the sum of the block before, or the embedding) is. So when a block begins, the queries of all its reads are
    made and scored against all finished sources at once (phase 1), and a read merges its result with the partial sum
    (phase 2). The first block has one finished source, which leaves nothing to take ahead. Starts as Block AttnRes.

    Parameters: 2 D + 2 r D a site. State: as Block AttnRes, and in a block one ``(mix, lse)`` in float32 for each read
    to come. Moves, for n finished sources and S reads: n / S + 5 tensors a sublayer in two phases, n + 2 in one.
    """

    short_name: ClassVar[str] = "block-lagged"
    formula: ClassVar[str] = "h = sum_n softmax_n(<w + B A norm(x), norm(b_n) g>) b_n;  x = b_{n-1} all through a block"
    citation: ClassVar[str] = "this project"

    sublayers_per_block: int = 4
    """Sublayers (not decoder layers) summed into one source, whose reads share one x."""
    rank: int = 8
    """Rank r of the part of the query that depends on the token."""
    phases: LaggedPhases = "two"
    """``"two"``: a block's reads go over the finished sources together. ``"one"``: each by itself. The function
    computed is the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rank(self.rank)
        if self.phases not in get_args(LaggedPhases):
            raise ConfigError(f'phases is {self.phases!r}; allowed are "one" and "two"')

    @property
    def label(self) -> str:
        """Name, form and rank, for tables and legends."""
        return f"{self.form} AttnRes, lagged rank-{self.rank} query"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with a zero pseudo-query, a key weight of ones, and a low-rank part that is zero.

        Raises:
            ConfigError: The rank is not below the width.
        """
        closes_block = self.closes_block(index, num_sublayers)
        return LowRankQuerySite(dim, rank=self.rank, eps=eps, closes_block=closes_block, device=device, dtype=dtype)

    def connect(self, sites: Sequence[Site]) -> None:
        """Tell the last site of each block which reads come next; the output read is a single one and does not."""
        ends = () if self.phases == "one" else self.block_ends(len(sites) - 1)
        for start, stop in pairwise(ends):
            before = sites[start - 1]
            assert isinstance(before, LowRankQuerySite)
            before.upcoming = tuple(site for site in sites[start:stop] if isinstance(site, DepthSite))

    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """Softmax of the scores against the query of the token and block."""
        assert isinstance(site, LowRankQuerySite)
        newest = stacked[..., len(state.finished) - 1, :]
        return scores(stacked, site.query(newest), site.eps).softmax(-1)[..., None, :, None]

    def read(self, state: History, site: Site) -> Tensor:
        """Merge what phase 1 has for this read with the partial sum; or all sources at once where it has nothing."""
        assert isinstance(site, LowRankQuerySite)
        part = None if state.ahead is None else state.ahead.of(site.index)
        if part is None:
            return super().read(state, site)
        if state.partial is not None:
            near = stack([state.partial])
            query = site.query(state.finished[-1].to(near.dtype))
            part = part.merge(PartialSoftmax(near[..., 0, :], scores(near, query, site.eps)[..., 0]))
        return (part.mixed * self._out_scale(state)).to(result_dtype(state.sources, stream_dtype(state.finished[0])))

    def resume(self, state: History, upcoming: Sequence[Site]) -> History:
        """Run phase 1 for what is left of a block's reads."""
        if not upcoming:
            return state
        return History(state.finished, state.partial, phase_1(stack(state.finished), upcoming))

    def write(self, state: History, site: Site, output: Tensor) -> History:
        """As of AttnRes; at the end of a block phase 1 of the next one."""
        assert isinstance(site, LowRankQuerySite)
        written = super().write(state, site, output)
        if site.upcoming:
            return History(written.finished, None, phase_1(stack(written.finished), site.upcoming))
        ahead = None if state.ahead is None else state.ahead.after(site.index)
        return History(written.finished, written.partial, ahead)


def phase_1(stacked: Tensor, upcoming: Sequence[Site]) -> Ahead:
    """All reads of a block against the finished sources ``[*batch, sources, dim]``, each source gone over once."""
    sites = [site for site in upcoming if isinstance(site, LowRankQuerySite)]
    wide, eps, count = stacked.dtype, sites[0].eps, len(sites)
    inverse = inverse_rms(stacked, eps)
    normed = stacked[..., -1, :] * inverse[..., -1:]
    down = torch.cat([site.query_down.to(wide) for site in sites])
    up = torch.stack([site.query_up.to(wide) for site in sites])
    pseudo_queries = torch.stack([site.pseudo_query.to(wide) for site in sites])
    key_weights = torch.stack([site.key_weight.to(wide) for site in sites])
    with without_autocast(stacked):
        low = (normed @ down.mT).unflatten(-1, (count, -1))
        queries = (pseudo_queries + (low[..., None, :] @ up.mT).squeeze(-2)) * key_weights
        raw = queries @ stacked.mT * inverse[..., None, :]
        mixed = raw.softmax(-1) @ stacked
    parts = zip(mixed.unbind(-2), raw.logsumexp(-1).unbind(-1), strict=True)
    return Ahead(tuple(PartialSoftmax(*part) for part in parts), (), stacked.shape[-2], sites[0].index, deferred=False)
