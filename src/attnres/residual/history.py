"""Strategies that keep outputs, or sums of them, as separate sources and mix these at every read."""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnres.errors import ConfigError
from attnres.ops.precision import result_dtype
from attnres.ops.stacked import mix, stack
from attnres.residual.schedule import Source, block_sources
from attnres.residual.site import Site
from attnres.residual.state import History
from attnres.residual.strategy import ReadScale, Strategy, stream_dtype


@dataclass(frozen=True, kw_only=True)
class HistoryStrategy(Strategy):
    """Base of the strategies whose state is a `History`. They differ in how the sources are weighted.

    A derived class gives `weights`, and its reads then run in plain PyTorch on the stacked sources.
    """

    read_scale: ReadScale | None = None
    """``"mean"``: the mix itself (the paper). ``"sum"``: the mix times its number of sources, which at zero
    queries is the residual sum. None: ``"mean"`` when a model is built, ``"sum"`` when a trained one is converted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.read_scale not in (None, "mean", "sum"):
            raise ConfigError(f'read_scale is {self.read_scale!r}; allowed are "mean" and "sum"')

    def with_read_scale(self, default: ReadScale) -> Strategy:
        """The same strategy, with ``default`` where `read_scale` was left open."""
        return self if self.read_scale is not None else replace(self, read_scale=default)

    def closes_block(self, site: int, num_sublayers: int) -> bool:
        """Whether the output written at a site completes a block."""
        return site + 1 in self.block_ends(num_sublayers)

    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """The embedding, the finished block sums, and the partial sum unless the site starts a block."""
        return block_sources(site, self.block_ends(num_sublayers))

    def start(self, embedding: Tensor) -> History:
        """The embedding as the only source."""
        return History((embedding,))

    @abstractmethod
    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """Weights ``[*batch, views, sources, channels]`` of the sources ``[*batch, sources, dim]``, without scale."""

    def read(self, state: History, site: Site) -> Tensor:
        """The weighted sum of the sources, in float32 (or float64) and rounded once."""
        sources = state.sources
        stacked = stack(sources)
        mixed = mix(stacked, self.weights(stacked, state, site))
        dtype = result_dtype(sources, stream_dtype(sources[0]))
        return (mixed * self._out_scale(state) if self.read_scale == "sum" else mixed).to(dtype)

    def write(self, state: History, site: Site, output: Tensor) -> History:
        """Add the output to the partial sum, which becomes a finished source when the site closes a block (Eq. 5)."""
        partial = output if state.partial is None else state.partial + output
        if not site.closes_block:
            return History(state.finished, partial)
        return History((*state.finished, partial))

    def read_weights(self, state: History, site: Site) -> Tensor:
        """The weights, times the number of sources with ``read_scale="sum"``."""
        return self.weights(stack(state.sources), state, site) * self._out_scale(state)

    def write_weights(self, state: History, site: Site, output: Tensor) -> Tensor:
        """Every source stays, and the output is one more, or part of the last one."""
        del site
        old = len(state.sources)
        keep = torch.eye(old, old + 1, device=output.device, dtype=torch.promote_types(output.dtype, torch.float32))
        added = keep.new_zeros(1, old + 1)
        added[0, old] = 1
        if state.partial is None:
            return torch.cat([keep, added])[..., None]
        return torch.cat([keep[:-1], keep[-1:] + added])[..., None]

    def _out_scale(self, state: History) -> float:
        return float(len(state.sources)) if self.read_scale == "sum" else 1.0


@dataclass(frozen=True, kw_only=True)
class AttnResVariant(HistoryStrategy):
    """Base of the variants of Attention Residuals; each can be had in the Full and in the Block form."""

    sublayers_per_block: int = 1
    """Sublayers (not decoder layers) summed into one source; 1 keeps every output apart, as Full AttnRes does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.sublayers_per_block
        if size < 1:
            raise ConfigError(f"sublayers_per_block is {size!r}; allowed is a whole number of 1 or more")

    @property
    def form(self) -> str:
        """``"Full"``, or ``"Block (S=...)"``."""
        return "Full" if self.sublayers_per_block == 1 else f"Block (S={self.sublayers_per_block})"

    def block_ends(self, num_sublayers: int) -> tuple[int, ...]:
        """Sublayer counts at which a block is complete."""
        size = self.sublayers_per_block
        return tuple(min(start + size, num_sublayers) for start in range(0, num_sublayers, size))
