"""Sandwich norm: a norm before the sublayer and another behind it."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor, nn

from attnres.residual.rivals.norms import norm_weight, rms_gain
from attnres.residual.site import Site
from attnres.residual.streams import Gain, SingleStream


@final
class SandwichSite(Site):
    """A site with the weight of the norm behind its sublayer, one at the start."""

    def __init__(self, dim: int, *, eps: float, device: Any, dtype: Any):
        super().__init__()
        self.eps = eps
        self.output_norm_weight = norm_weight(dim, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        nn.init.ones_(self.output_norm_weight)


@final
@dataclass(frozen=True, kw_only=True)
class SandwichNorm(SingleStream):
    """``x <- x + Norm(f(Norm(x)))``: the output is normalised before it is added, the stream itself never is.

    The inner norm is the sublayer's own. Every output enters with the same length, however small the sublayer's weights
    are, so it does not start as PreNorm's function. RMSNorm stands for the LayerNorm of CogView; Peri-LN (arXiv
    2502.02732) is the same with RMSNorm.

    Parameters: D a sublayer. State: 1 tensor. Moves: 3 tensors a sublayer.
    """

    short_name: ClassVar[str] = "sandwich"
    formula: ClassVar[str] = "h = x;  x <- x + Norm(v)"
    citation: ClassVar[str] = "CogView, arXiv 2105.13290"

    @property
    def label(self) -> str:
        """Name for tables and legends."""
        return "Sandwich norm"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with the norm of its sublayer's output; the output site has none."""
        return Site() if index == num_sublayers else SandwichSite(dim, eps=eps, device=device, dtype=dtype)

    def gain(self, hidden: Tensor, site: Site, output: Tensor) -> Gain:
        """The norm of the output."""
        del hidden
        assert isinstance(site, SandwichSite)
        return rms_gain(output, site.output_norm_weight, site.eps)
