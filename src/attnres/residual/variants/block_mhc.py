"""Block AttnRes whose running block is kept in several streams."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from attnres.errors import ConfigError
from attnres.ops.precision import result_dtype, without_autocast
from attnres.ops.stacked import mix, scores, stack
from attnres.residual.history import AttnResVariant
from attnres.residual.rivals.mhc import sinkhorn
from attnres.residual.schedule import Source
from attnres.residual.site import DepthSite, Site
from attnres.residual.state import History
from attnres.residual.strategy import stream_dtype
from attnres.residual.variants.block_streams import BlockStreamSite
from attnres.residual.weights import keep, rows


@final
@dataclass(frozen=True, kw_only=True)
class BlockMHC(AttnResVariant):
    """Depth attention over the finished blocks and ``pre^T X``, X the m streams of the running block.

    ``X <- res X + post v^T`` with mHC's maps; when a block ends, the sum of its streams becomes a source, and the next
    block begins without streams (not with zeros): its first output is spread by a bias alone. Two factors differ from
    mHC, so that the model starts as Block AttnRes, and so as PreNorm's function: ``pre = 2 sigmoid(.)`` starts at 1 for
    all streams, and ``post`` is divided by what it sums to at the start.

    Parameters: 2 D a site, and mHC's at the sites within a block. State: finished sources and m streams. Moves: as
    Block AttnRes with m tensors for the partial sum, which is 3m + n + 2 a sublayer with n finished sources.
    """

    short_name: ClassVar[str] = "block-mhc"
    formula: ClassVar[str] = "h = sum_n softmax_n(<w, norm(b_n) g>) b_n, the last b pre^T X;  X <- res X + post v^T"
    citation: ClassVar[str] = "this project; mHC, arXiv 2512.24880, and Attention Residuals, arXiv 2603.15031"

    sublayers_per_block: int = 4
    """Sublayers (not decoder layers) that share the streams and become one source."""
    streams: int = 4
    """Number of streams m."""
    sinkhorn_iterations: int = 20
    """Row and column normalisations that make the mixing matrix doubly stochastic."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("streams", "sinkhorn_iterations"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value!r}; allowed is a whole number of 1 or more")

    @property
    def label(self) -> str:
        """Name, form and streams, for tables and legends."""
        return f"{self.form} AttnRes over mHC ({self.streams} streams)"

    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """As of Block AttnRes, with the running block once for each stream."""
        plain, ends = super().sources(site, num_sublayers), self.block_ends(num_sublayers)
        running = [not source.embedding and source.stop not in ends for source in plain]
        return tuple(each for each, m in zip(plain, running, strict=True) for _ in range(self.streams if m else 1))

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with depth attention's parameters and, but at the output, those of the streams."""
        closes_block = self.closes_block(index, num_sublayers)
        options: dict[str, Any] = {"eps": eps, "closes_block": closes_block, "device": device, "dtype": dtype}
        if index == num_sublayers:
            return DepthSite(dim, **options)
        return BlockStreamSite(dim, self.streams, index, first=index % self.sublayers_per_block == 0, **options)

    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """The softmax values of the finished sources and of what is read of the streams."""
        del state
        assert isinstance(site, DepthSite)
        return scores(stacked, site.folded(stacked.dtype), site.eps).softmax(-1)[..., None, :, None]

    def read(self, state: History, site: Site) -> Tensor:
        """Depth attention over the finished sources and ``pre^T X``."""
        stacked = self._stacked(state, site)
        mixed = mix(stacked, self.weights(stacked, state, site)) * self._scale(stacked)
        return mixed.to(result_dtype((*state.finished, *state.extra), stream_dtype(state.finished[0])))

    def write(self, state: History, site: Site, output: Tensor) -> History:
        """``res X + post v^T``; at the end of a block the sum of the streams."""
        res, post = self._res_post(state, site, output)
        with without_autocast(output):
            streams = post[..., None] * output.to(post.dtype)[..., None, :]
            if res is not None:
                streams = res @ state.extra[0].to(res.dtype) + streams
        if site.closes_block:
            return History((*state.finished, streams.sum(-2).to(output.dtype)))
        return History(state.finished, extra=(streams.to(output.dtype),))

    def read_weights(self, state: History, site: Site) -> Tensor:
        """The softmax values, the last one spread over the streams."""
        stacked = self._stacked(state, site)
        weights = self.weights(stacked, state, site) * self._scale(stacked)
        if not state.extra:
            return weights
        spread = weights[..., -1:, :] * self._pre(state, site)[..., None, :, None]
        return torch.cat([weights[..., :-1, :].expand(*spread.shape[:-2], -1, -1), spread], -2)

    def write_weights(self, state: History, site: Site, output: Tensor) -> Tensor:
        """Finished sources stay; ``res`` and ``post`` beside each other, or their sums over the streams."""
        res, post = self._res_post(state, site, output)
        done, old = len(state.finished), 0 if res is None else self.streams
        maps = post[..., None] if res is None else torch.cat([res, post[..., None].expand(*res.shape[:-1], 1)], -1)
        if site.closes_block:
            maps = maps.sum(-2, keepdim=True)
        lower = torch.cat([maps.new_zeros(*maps.shape[:-1], done), maps], -1)[..., None]
        upper = rows(done + old + 1, keep(done), output).to(maps.dtype)
        return torch.cat([upper.expand(*lower.shape[:-3], *upper.shape), lower], -3)

    def _stacked(self, state: History, site: Site) -> Tensor:
        """The sources of a read, the running block as ``pre^T X``: ``[*batch, sources, dim]``."""
        stacked = stack(state.finished)
        if not state.extra:
            return stacked
        streams = state.extra[0].to(stacked.dtype)
        with without_autocast(streams):
            running = self._pre(state, site).to(stacked.dtype)[..., None, :] @ streams
        return torch.cat([stacked, running], -2)

    def _pre(self, state: History, site: Site) -> Tensor:
        assert isinstance(site, BlockStreamSite)
        assert site.maps is not None
        return 2 * site.maps.logits(state.extra[0])[0].sigmoid()

    def _res_post(self, state: History, site: Site, output: Tensor) -> tuple[Tensor | None, Tensor]:
        """What is left of the streams, if there are any, and how the output is spread."""
        assert isinstance(site, BlockStreamSite)
        gain = (1 + math.exp(-1)) / (1 + (self.streams - 1) * math.exp(-1))  # sigmoid(-1) = sigmoid(1) / e
        if site.maps is None:
            wide = torch.promote_types(output.dtype, torch.float32)
            return None, gain * site.post_bias.to(wide).sigmoid()
        _, post, res = site.maps.logits(state.extra[0])
        res = sinkhorn(res.unflatten(-1, (self.streams, self.streams)), self.sinkhorn_iterations)
        return res.mT, gain * post.sigmoid()

    def _scale(self, stacked: Tensor) -> float:
        return float(stacked.shape[-2]) if self.read_scale == "sum" else 1.0
