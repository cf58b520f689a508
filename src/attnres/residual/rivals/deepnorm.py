"""DeepNorm: PostNorm with an amplified stream and a damped start, for very deep models."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor

from attnres.residual.rivals.norms import own_norm_gain
from attnres.residual.site import Site
from attnres.residual.streams import Gain, SingleStream


@final
class AmplifiedSite(Site):
    """A site that knows by how much the stream is amplified before an output is added."""

    def __init__(self, alpha: float):
        super().__init__()
        self.alpha = alpha


@final
@dataclass(frozen=True, kw_only=True)
class DeepNorm(SingleStream):
    """``x <- Norm(alpha x + f(x))`` with ``alpha = (2N)^(1/4)`` for N decoder layers.

    Part of the method is the start: in a new model the weights of the value, output and MLP projections are
    multiplied by ``beta = (8N)^(-1/4)``, those of queries and keys are not. Easy to get wrong: N counts decoder
    layers, not sublayers, and other constants hold for encoders. All matrices of a gated MLP are scaled. The paper
    multiplies Xavier's start; here it is whatever start the family has. A projection that makes keys and values
    together (Kimi Linear's MLA) is not scaled. The place of the norms is that of `PostNorm`: what is carried is the
    sum before its norm, the first norm is the embedding's, and the model's final norm is the last post-norm.

    Parameters: none of its own. State: 1 tensor. Moves: 5 tensors a sublayer.
    """

    short_name: ClassVar[str] = "deepnorm"
    formula: ClassVar[str] = "h = x;  x <- Norm(alpha x + v);  alpha = (2N)^(1/4)"
    citation: ClassVar[str] = "DeepNet, arXiv 2203.00555"

    @property
    def label(self) -> str:
        """Name for tables and legends."""
        return "DeepNorm"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site without parameters that knows alpha; N is half the number of sublayers."""
        del index, dim, eps, device, dtype
        return AmplifiedSite(num_sublayers**0.25)

    def takes_norm(self, index: int, num_sublayers: int) -> bool:
        """Every sublayer's norm; the output is left to the model's final norm."""
        return index < num_sublayers

    def weight_gain(self, num_sublayers: int) -> float:
        """``beta``."""
        return (4 * num_sublayers) ** -0.25

    def read_gain(self, hidden: Tensor, site: Site) -> Gain:
        """The norm of the sum; at the output it is the model's final norm."""
        return own_norm_gain(hidden, site) if site.takes_norm else None

    def keep(self, hidden: Tensor, site: Site) -> Gain:
        """``alpha`` times the norm of the sum."""
        assert isinstance(site, AmplifiedSite)
        return site.alpha * own_norm_gain(hidden, site)
