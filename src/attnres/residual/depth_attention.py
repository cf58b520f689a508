"""Depth attention as a strategy: the reads of Full and Block AttnRes, by the fused operators."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attnres.errors import ConfigError
from attnres.ops import depth_attention
from attnres.residual.history import HistoryStrategy
from attnres.residual.site import DepthSite, Site
from attnres.residual.state import History
from attnres.residual.strategy import stream_dtype
from attnres.residual.two_phase import Phases, look_ahead, read_ahead


@dataclass(frozen=True, kw_only=True)
class DepthAttentionStrategy(HistoryStrategy):
    """Base of the strategies whose read is depth attention with a fused operator, in one phase or two."""

    phases: Phases = "auto"
    """``"one"``: each read goes over all its sources by itself. ``"two"``: the reads of a block go over the finished
    sources together, before the block runs, and each is merged with the partial sum later (paper, Algorithm 1).
    ``"auto"``: whichever is faster, see `attnres.residual.two_phase`. The function computed is the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.phases not in ("auto", "one", "two"):
            raise ConfigError(f'phases is {self.phases!r}; allowed are "auto", "one" and "two"')

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> DepthSite:
        """A site with a zero pseudo-query and a key weight of ones."""
        closes_block = self.closes_block(index, num_sublayers)
        return DepthSite(dim, eps=eps, closes_block=closes_block, device=device, dtype=dtype)

    @abstractmethod
    def phase_starts(self, num_sublayers: int) -> tuple[int, ...]:
        """Sublayer counts after which phase 1 runs for the reads up to the next one; see `phases`."""

    def connect(self, sites: Sequence[Site]) -> None:
        """Tell each site after whose write phase 1 runs which reads that is for."""
        starts = () if self.phases == "one" else self.phase_starts(len(sites) - 1)
        for start, stop in pairwise(starts):
            before, upcoming = sites[start - 1], sites[start:stop]
            assert isinstance(before, DepthSite)
            before.upcoming = tuple(site for site in upcoming if isinstance(site, DepthSite))

    def resume(self, state: History, upcoming: Sequence[Site]) -> History:
        """Run phase 1 for what is left of a block's reads."""
        sites = [site for site in upcoming if isinstance(site, DepthSite)]
        return self._look_ahead(state, sites) if sites else state

    def read(self, state: History, site: Site) -> Tensor:
        """Depth attention over the finished sources and the partial sum (paper, Eq. 2-4 and 6)."""
        return self._mix(state, site, stream_dtype(state.finished[0]))

    def read_normed(self, state: History, site: Site, norm_weight: Tensor, norm_eps: float) -> tuple[Tensor, History]:
        """The read and the norm that follows it, in one pass where no gradient is wanted."""
        first = state.finished[0]
        dtype = stream_dtype(first)
        if torch.is_grad_enabled() or norm_weight.dtype != (dtype or first.dtype):
            return super().read_normed(state, site, norm_weight, norm_eps)
        return self._mix(state, site, dtype, norm_weight, norm_eps), state

    def _mix(
        self,
        state: History,
        site: Site,
        dtype: torch.dtype | None,
        norm_weight: Tensor | None = None,
        norm_eps: float | None = None,
    ) -> Tensor:
        assert isinstance(site, DepthSite)
        part = None if state.ahead is None else state.ahead.of(site.index)
        options: dict[str, Any] = {
            "eps": site.eps,
            "out_scale": self._out_scale(state),
            "out_norm_weight": norm_weight,
            "out_norm_eps": norm_eps,
            "dtype": dtype,
        }
        if part is None:
            return depth_attention(state.sources, *site.vectors, **options)
        return read_ahead(state, part, *site.vectors, **options)

    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """The softmax values (paper, Eq. 3)."""
        del stacked
        return self._attend(state, site, return_weights=True).depth_weights[..., None, :, None]

    def read_weights(self, state: History, site: Site) -> Tensor:
        """The softmax values, times the number of sources with ``read_scale="sum"``."""
        weights = self._attend(state, site, return_weights=True).depth_weights
        return weights[..., None, :, None] * self._out_scale(state)

    def write(self, state: History, site: Site, output: Tensor) -> History:
        """Add the output to the partial sum, which becomes a finished source when the site closes a block (Eq. 5)."""
        assert isinstance(site, DepthSite)
        partial = output if state.partial is None else state.partial + output
        ahead = None if state.ahead is None else state.ahead.after(site.index)
        if not site.closes_block:
            return History(state.finished, partial, ahead)
        return self._ahead(History((*state.finished, partial), None, ahead), site)

    def _ahead(self, written: History, site: DepthSite) -> History:
        """The state after a site that closes a block, with phase 1 of the reads that come, if there is one."""
        return self._look_ahead(written, site.upcoming) if site.upcoming else written

    def _look_ahead(self, state: History, upcoming: Sequence[DepthSite]) -> History:
        first = upcoming[0]
        return look_ahead(
            state,
            [(site.pseudo_query, site.key_weight) for site in upcoming],
            first=first.index,
            phases=self.phases,
            eps=first.eps,
            dtype=stream_dtype(state.finished[0]),
            training=first.training,
        )

    def _attend(self, state: History, site: Site, *, return_weights: bool) -> Any:
        assert isinstance(site, DepthSite)
        return depth_attention(
            state.sources,
            *site.vectors,
            eps=site.eps,
            out_scale=self._out_scale(state),
            dtype=stream_dtype(state.finished[0]),
            return_weights=return_weights,
        )
