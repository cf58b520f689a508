"""What a residual strategy is: where a sublayer gets its input from, and where its output goes.

A strategy holds settings only. What it learns lives in one `Site` per place where the history is read, and what flows
is an immutable state, so a strategy can be printed, compared, written to a file and used by several models at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.ops import depth_attention
from attnres.residual.schedule import Source
from attnres.residual.state import History
from attnres.residual.two_phase import Phases, look_ahead, read_ahead

ReadScale = Literal["mean", "sum"]


class Site(nn.Module):
    """One place where the history is read: a sublayer's input, or the output. Without parameters of its own."""

    index: int = -1
    """Place among the sites of a model, given by the `Residual` that holds it; the output read comes last."""

    def __init__(self, *, closes_block: bool = False):
        super().__init__()
        self.closes_block = closes_block

    def reset_parameters(self) -> None:
        """Give the parameters their initial values."""


class DepthSite(Site):
    """A site with its own pseudo-query (zero at start) and key weight (one at start).

    The initial values are exact however the module comes to be: by the constructor, by `reset_parameters`, by moving a
    module off the meta device, and through an initialisation pass of a Hugging Face model (which leaves it alone).
    """

    pseudo_query: nn.Parameter
    key_weight: nn.Parameter
    upcoming: tuple["DepthSite", ...]
    """The sites whose reads phase 1 computes once this one is written; referred to, not owned. Mostly none."""

    def __init__(
        self,
        dim: int,
        *,
        eps: float,
        closes_block: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(closes_block=closes_block)
        self.eps = eps
        self.upcoming = ()
        self.pseudo_query = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))
        self.key_weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the pseudo-query to zeros and the key weight to ones."""
        nn.init.zeros_(self.pseudo_query)
        nn.init.ones_(self.key_weight)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        was_meta = self.pseudo_query.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.pseudo_query.is_meta:  # to_empty() leaves whatever the memory held
            self.reset_parameters()
        return self

    def extra_repr(self) -> str:
        """Width, eps and whether the site's write completes a block."""
        return f"{self.pseudo_query.shape[-1]}, eps={self.eps}, closes_block={self.closes_block}"


class Strategy(ABC):
    """A residual strategy: `start`, `read` and `write` over an immutable state.

    ::

        state = strategy.start(embedding)
        for site, sublayer in zip(sites, sublayers):
            state = strategy.write(state, site, sublayer(strategy.read(state, site)))
        hidden = strategy.read(state, output_site)
    """

    short_name: ClassVar[str]
    """The word for it on a command line."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Name and settings, for tables and legends."""

    @abstractmethod
    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """Make the site ``index``; ``num_sublayers`` is the output read."""

    def connect(self, sites: Sequence[Site]) -> None:
        """Let the sites of one model, output read last, know of each other where that is needed."""
        del sites

    @abstractmethod
    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """What the read at a site sees, oldest first."""

    def block_ends(self, num_sublayers: int) -> tuple[int, ...]:
        """Sublayer counts at which a block is complete; empty for a strategy without blocks."""
        del num_sublayers
        return ()

    def with_read_scale(self, default: ReadScale) -> "Strategy":
        """The same strategy with its read scale settled, where it has one that was left open."""
        del default
        return self

    @abstractmethod
    def start(self, embedding: Tensor) -> Any:
        """The state before the first sublayer."""

    @abstractmethod
    def read(self, state: Any, site: Site) -> Tensor:
        """The input of a sublayer (before its norm), or of the final norm."""

    @abstractmethod
    def write(self, state: Any, site: Site, output: Tensor) -> Any:
        """The state after a sublayer's output; the given state stays as it is."""

    @abstractmethod
    def depth_weights(self, state: Any, site: Site) -> Tensor:
        """Weight of each source of `sources` in the read at a site, ``[*batch, sources]``."""


@dataclass(frozen=True, kw_only=True)
class DepthAttentionStrategy(Strategy):
    """Base of the strategies whose read is depth attention over a `History`."""

    read_scale: ReadScale | None = None
    """``"mean"``: the softmax mix itself (the paper). ``"sum"``: the mix times its number of sources, which at zero
    queries is the residual sum. None: ``"mean"`` when a model is built, ``"sum"`` when a trained one is converted."""
    phases: Phases = "auto"
    """``"one"``: each read goes over all its sources by itself. ``"two"``: the reads of a block go over the finished
    sources together, before the block runs, and each is merged with the partial sum later (paper, Algorithm 1).
    ``"auto"``: whichever is faster, see `attnres.residual.two_phase`. The function computed is the same."""

    def __post_init__(self) -> None:
        if self.read_scale not in (None, "mean", "sum"):
            raise ConfigError(f'read_scale is {self.read_scale!r}; allowed are "mean" and "sum"')
        if self.phases not in ("auto", "one", "two"):
            raise ConfigError(f'phases is {self.phases!r}; allowed are "auto", "one" and "two"')

    def with_read_scale(self, default: ReadScale) -> Strategy:
        """The same strategy, with ``default`` where `read_scale` was left open."""
        return self if self.read_scale is not None else replace(self, read_scale=default)

    def closes_block(self, site: int, num_sublayers: int) -> bool:
        """Whether the output written at a site completes a block."""
        return site + 1 in self.block_ends(num_sublayers)

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

    def start(self, embedding: Tensor) -> History:
        """The embedding as the only source."""
        return History((embedding,))

    def read(self, state: History, site: Site) -> Tensor:
        """Depth attention over the finished sources and the partial sum (paper, Eq. 2-4 and 6)."""
        assert isinstance(site, DepthSite)
        part = None if state.ahead is None else state.ahead.of(site.index)
        if part is None:
            return self._attend(state, site, return_weights=False)
        return read_ahead(
            state,
            part,
            site.pseudo_query,
            site.key_weight,
            eps=site.eps,
            out_scale=self._out_scale(state),
            dtype=stream_dtype(state.finished[0]),
        )

    def depth_weights(self, state: History, site: Site) -> Tensor:
        """The softmax values, times the number of sources with ``read_scale="sum"``."""
        weights = self._attend(state, site, return_weights=True).depth_weights
        return weights * self._out_scale(state)

    def write(self, state: History, site: Site, output: Tensor) -> History:
        """Add the output to the partial sum, which becomes a finished source when the site closes a block (Eq. 5)."""
        assert isinstance(site, DepthSite)
        partial = output if state.partial is None else state.partial + output
        ahead = None if state.ahead is None else state.ahead.after(site.index)
        if not site.closes_block:
            return History(state.finished, partial, ahead)
        written = History((*state.finished, partial), None, ahead)
        if not site.upcoming:
            return written
        return look_ahead(
            written,
            [(upcoming.pseudo_query, upcoming.key_weight) for upcoming in site.upcoming],
            first=site.upcoming[0].index,
            phases=self.phases,
            eps=site.eps,
            dtype=stream_dtype(written.finished[0]),
            training=site.training,
        )

    def _out_scale(self, state: History) -> float:
        return float(len(state.sources)) if self.read_scale == "sum" else 1.0

    def _attend(self, state: History, site: Site, *, return_weights: bool) -> Any:
        assert isinstance(site, DepthSite)
        return depth_attention(
            state.sources,
            site.pseudo_query,
            site.key_weight,
            eps=site.eps,
            out_scale=self._out_scale(state),
            dtype=stream_dtype(state.finished[0]),
            return_weights=return_weights,
        )


def stream_dtype(embedding: Tensor) -> torch.dtype | None:
    """The declared dtype of the reads: autocast's where it is on, else none (then all sources must agree).

    Under autocast the embedding is float32 and sublayer outputs are not; without a declared dtype the first source
    would promote the whole stream. Autocast leaves float64 alone, and so does a read.
    """
    kind = embedding.device.type
    if embedding.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
