"""Depth attention over cumulative states, as some public code has it, under its own name."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from attnres.residual.schedule import Source
from attnres.residual.site import DepthSite, Site
from attnres.residual.state import History
from attnres.residual.variants.fused import FusedVariant
from attnres.residual.weights import keep, rows


@final
@dataclass(frozen=True, kw_only=True)
class Cumulative(FusedVariant):
    """``h = sum_i softmax_i(s_i) x_i`` with ``x_i`` the running residual sum after i sublayers: *not* AttnRes.

    Some public code routes over these states and calls that AttnRes; Delta AttnRes (arXiv 2605.18855) measures against
    it. The sources share most of what they hold, so their scores differ little, and no weights can leave an old output
    out without leaving out all since. With zero queries a read is the mean of all states, which is not PreNorm; with
    ``read_scale="sum"`` it grows with the square of the depth.

    Parameters and state: as AttnRes. Moves: as AttnRes, and without blocks 3 tensors more a sublayer. With blocks, the
    states are those at the ends of blocks, and the newest.
    """

    short_name: ClassVar[str] = "cumulative"
    formula: ClassVar[str] = "h = sum_i softmax_i(<w, norm(x_i) g>) x_i;  x_i = x_{i-1} + v_i, x_0 the embedding"
    citation: ClassVar[str] = "public code, e.g. github.com/wdlctc/open-attention-residuals; cf. arXiv 2605.18855"

    @property
    def label(self) -> str:
        """Name and form, for tables and legends."""
        return f"{self.form}, cumulative states"

    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """The embedding with all outputs up to where each source of AttnRes stops."""
        stops = [source.stop for source in super().sources(site, num_sublayers)]
        return tuple(Source(embedding=True, first=0, stop=stop) for stop in stops)

    def write(self, state: History, site: Site, output: Tensor) -> History:
        """Add the output to the newest state; with blocks, that one is replaced until the block is finished."""
        assert isinstance(site, DepthSite)
        newest = state.sources[-1] + output
        ahead = None if state.ahead is None else state.ahead.after(site.index)
        if not site.closes_block:
            return History(state.finished, newest, ahead)
        return self._ahead(History((*state.finished, newest), None, ahead), site)

    def write_weights(self, state: History, site: Site, output: Tensor) -> Tensor:
        """States stay; the newest has the one before and the output."""
        del site
        count = len(state.sources)
        return rows(count + 1, [*keep(len(state.finished)), {count - 1: 1.0, count: 1.0}], output)
