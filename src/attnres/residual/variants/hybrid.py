"""PreNorm in the lower sublayers, AttnRes in the upper ones."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor

from attnres.errors import ConfigError
from attnres.residual.schedule import Source, block_sources
from attnres.residual.site import DepthSite, Site
from attnres.residual.state import History
from attnres.residual.variants.fused import FusedVariant


@final
@dataclass(frozen=True, kw_only=True)
class Hybrid(FusedVariant):
    """PreNorm below a sublayer, AttnRes from it on; the running sum at that point takes the embedding's place.

    Lower sublayers cost what PreNorm costs, and the history is shorter. With zero queries the reads are the residual
    sum over the number of sources, so the model starts as PreNorm's function.

    Parameters: 2 D a site from ``first_sublayer`` on. State and moves: below, one tensor; above, as AttnRes of the
    remaining depth.
    """

    short_name: ClassVar[str] = "hybrid"
    formula: ClassVar[str] = "h = x, x <- x + v below sublayer f;  above, AttnRes with v_0 = x_f"
    citation: ClassVar[str] = "this project; cf. Attention Residuals, arXiv 2603.15031"

    first_sublayer: int = 4
    """Sublayer, counted from 0, whose read is the first that may choose; below it the residual is PreNorm's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        first = self.first_sublayer
        if first < 0:
            raise ConfigError(f"first_sublayer is {first!r}; allowed is a whole number of 0 or more")

    @property
    def label(self) -> str:
        """Name, form and place, for tables and legends."""
        return f"PreNorm, then {self.form} AttnRes from {self.first_sublayer}"

    def block_ends(self, num_sublayers: int) -> tuple[int, ...]:
        """Sublayer counts at which a block is complete, counted from the first sublayer of AttnRes on.

        Raises:
            ConfigError: There is no such sublayer.
        """
        first, size = self.first_sublayer, self.sublayers_per_block
        if first >= num_sublayers:
            raise ConfigError(f"first_sublayer is {first}; allowed is below {num_sublayers} (the number of sublayers)")
        return tuple(min(start + size, num_sublayers) for start in range(first, num_sublayers, size))

    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """The running sum; from ``first_sublayer`` on also blocks and the partial sum."""
        first = self.first_sublayer
        running = Source(embedding=True, first=0, stop=min(site, first))
        later = block_sources(max(site, first), (first, *self.block_ends(num_sublayers)))
        return (running, *(each for each in later if each.stop > each.first >= first))

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Any:
        """As of AttnRes; below ``first_sublayer`` without parameters."""
        site = super().site(index, num_sublayers, dim, eps=eps, device=device, dtype=dtype)
        return Site() if index < self.first_sublayer else site

    def read(self, state: History, site: Site) -> Tensor:
        """The running sum as it is, or depth attention."""
        return super().read(state, site) if isinstance(site, DepthSite) else state.finished[0]

    def write(self, state: History, site: Site, output: Tensor) -> History:
        """Add the output to the running sum, or write it as AttnRes does."""
        if isinstance(site, DepthSite):
            return super().write(state, site, output)
        return History((state.finished[0] + output,))

    def read_weights(self, state: History, site: Site) -> Tensor:
        """One, or the softmax values."""
        if isinstance(site, DepthSite):
            return super().read_weights(state, site)
        return state.finished[0].new_ones(1, 1, 1)

    def write_weights(self, state: History, site: Site, output: Tensor) -> Tensor:
        """The output is added to the running sum, or written as in AttnRes."""
        if isinstance(site, DepthSite):
            return super().write_weights(state, site, output)
        return output.new_ones(1, 2, 1)
