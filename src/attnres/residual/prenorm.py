"""PreNorm: the fixed residual sum, the baseline of every comparison."""

from dataclasses import dataclass
from typing import ClassVar, final

from attnres.residual.streams import SingleStream


@final
@dataclass(frozen=True, kw_only=True)
class PreNorm(SingleStream):
    """The standard residual: every read is the plain sum of the embedding and all outputs so far.

    ``h_l = h_{l-1} + f_{l-1}(h_{l-1})``. No parameters; the state is one tensor per token.
    """

    short_name: ClassVar[str] = "prenorm"
    formula: ClassVar[str] = "h = x;  x <- x + v"
    citation: ClassVar[str] = "Xiong et al. 2020, arXiv 2002.04745"

    @property
    def label(self) -> str:
        """Name for tables and legends."""
        return "PreNorm"
