"""PostNorm: the norm stands behind the addition, as in the first transformer."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from attnres.residual.rivals.norms import own_norm_gain
from attnres.residual.site import Site
from attnres.residual.streams import Gain, SingleStream


@final
@dataclass(frozen=True, kw_only=True)
class PostNorm(SingleStream):
    """``x <- Norm(x + f(x))``: a sublayer reads the normalised stream, and it is the normalised stream that goes on.

    What is carried is the sum before its norm, ``u <- Norm(u) + v``; the norm is applied at the next read. So the norms
    are those of the base model, one place further on: that of a sublayer is the post-norm of the sublayer before it,
    the first normalises the embedding, and the model's final norm is the last post-norm. Easy to get wrong: the
    stream that is added to is ``Norm(u)``, not ``u``. It does not start as PreNorm's function. RMSNorm stands for the
    LayerNorm of the paper.

    Parameters: none of its own. State: 1 tensor. Moves: 5 tensors a sublayer.
    """

    short_name: ClassVar[str] = "postnorm"
    formula: ClassVar[str] = "h = x;  x <- Norm(x + v)"
    citation: ClassVar[str] = "Vaswani et al. 2017, arXiv 1706.03762"

    @property
    def label(self) -> str:
        """Name for tables and legends."""
        return "PostNorm"

    def takes_norm(self, index: int, num_sublayers: int) -> bool:
        """Every sublayer's norm; the output is left to the model's final norm."""
        return index < num_sublayers

    def read_gain(self, hidden: Tensor, site: Site) -> Gain:
        """The norm of the sum; at the output it is the model's final norm."""
        return own_norm_gain(hidden, site) if site.takes_norm else None

    def keep(self, hidden: Tensor, site: Site) -> Gain:
        """The norm of the sum, as in the read."""
        return own_norm_gain(hidden, site)
