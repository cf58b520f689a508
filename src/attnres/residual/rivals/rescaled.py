"""The rescaled residual: the running mean of the embedding and all outputs."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from attnres.residual.site import Site
from attnres.residual.streams import Gain, SingleStream


@final
@dataclass(frozen=True, kw_only=True)
class RescaledResidual(SingleStream):
    """``x <- l/(l+1) x + 1/(l+1) v`` for the l-th output, l = 1, 2, ...: the mean of the embedding and l outputs.

    Easy to get wrong: a count that starts at 0 drops the embedding. The mean is the residual sum divided by l + 1,
    and a sublayer sees it through its norm; so with pre-norm sublayers, whose own norm is kept here, this is
    PreNorm's function at any weights, up to the norm's eps. It is the control for what a change of scale alone does,
    as in AttnRes with zero queries, and differs where sublayers have no norm of their own.

    Parameters: none. State: 1 tensor. Moves: 3 tensors a sublayer.
    """

    short_name: ClassVar[str] = "rescaled"
    formula: ClassVar[str] = "h = x;  x <- l/(l+1) x + 1/(l+1) v for output l"
    citation: ClassVar[str] = "Z. Liu, control for AttnRes (blog post, 2026)"

    @property
    def label(self) -> str:
        """Name for tables and legends."""
        return "Rescaled residual"

    def keep(self, hidden: Tensor, site: Site) -> Gain:
        """``l / (l + 1)``; the output written at site i is number i + 1."""
        del hidden
        return (site.index + 1) / (site.index + 2)

    def gain(self, hidden: Tensor, site: Site, output: Tensor) -> Gain:
        """``1 / (l + 1)``."""
        del hidden, output
        return 1 / (site.index + 2)
