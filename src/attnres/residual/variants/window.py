"""AttnRes over the embedding and the newest outputs only (paper, Table 4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from attnres.errors import ConfigError
from attnres.ops import depth_attention
from attnres.residual.history import HistoryStrategy
from attnres.residual.schedule import EMBEDDING, Source
from attnres.residual.site import DepthSite, Site
from attnres.residual.state import History
from attnres.residual.strategy import stream_dtype


@final
@dataclass(frozen=True, kw_only=True)
class SlidingWindow(HistoryStrategy):
    """AttnRes whose sources are the embedding and the last W outputs (paper, Table 4, W = 1 + 8: 1.764).

    Older outputs are dropped from the state, which so stays at W + 1 tensors. The reads are those of AttnRes, by the
    same operator, in one phase. With zero queries it is not the residual sum once an output has been dropped.

    Parameters: 2D a site. State: W + 1 tensors. Moves: W + 2 tensors a sublayer.
    """

    short_name: ClassVar[str] = "window"
    formula: ClassVar[str] = "h = sum_i softmax_i(<w, norm(v_i) g>) v_i;  i the embedding and the last W outputs"
    citation: ClassVar[str] = "Attention Residuals, arXiv 2603.15031, Table 4"

    window: int = 8
    """Newest outputs W that a read sees, besides the embedding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ConfigError(f"window is {self.window!r}; allowed is a whole number of 1 or more")

    @property
    def label(self) -> str:
        """Name and window, for tables and legends."""
        return f"Full AttnRes, window 1+{self.window}"

    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """The embedding and the newest outputs."""
        del num_sublayers
        first = max(0, site - self.window)
        return (EMBEDDING, *(Source(False, output, output + 1) for output in range(first, site)))

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with a zero pseudo-query and a key weight of ones."""
        return DepthSite(dim, eps=eps, closes_block=index < num_sublayers, device=device, dtype=dtype)

    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """The softmax values."""
        assert isinstance(site, DepthSite)
        sources: Sequence[Tensor] = stacked.unbind(-2)
        read = depth_attention(sources, site.pseudo_query, site.key_weight, eps=site.eps, return_weights=True)
        assert not isinstance(read, Tensor)
        assert read.depth_weights is not None
        return read.depth_weights[..., None, :, None]

    def read(self, state: History, site: Site) -> Tensor:
        """Depth attention over what is left in the state."""
        assert isinstance(site, DepthSite)
        dtype = stream_dtype(state.finished[0])
        scale = self._out_scale(state)
        return depth_attention(
            state.finished, site.pseudo_query, site.key_weight, eps=site.eps, out_scale=scale, dtype=dtype
        )

    def write(self, state: History, site: Site, output: Tensor) -> History:
        """Add the output, and drop the oldest one that no later read sees."""
        del site
        return History((state.finished[0], *state.finished[1:][-(self.window - 1) or len(state.finished) :], output))

    def write_weights(self, state: History, site: Site, output: Tensor) -> Tensor:
        """The rows of the tensors that stay."""
        rows = super().write_weights(state, site, output)
        return rows if len(rows) <= self.window + 1 else torch.cat([rows[:1], rows[2:]])
