"""ReZero: one learned factor per sublayer, zero at the start."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from attnres.residual.site import Site
from attnres.residual.streams import Gain, SingleStream


@final
class ReZeroSite(Site):
    """A sublayer's factor, zero at the start."""

    def __init__(self, *, device: Any, dtype: Any):
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the factor to zero."""
        nn.init.zeros_(self.alpha)


@final
@dataclass(frozen=True, kw_only=True)
class ReZero(SingleStream):
    """``x <- x + alpha_l f_l(x)`` with a scalar for each sublayer that starts at zero.

    At the start every read is the embedding, and only the factors have a gradient. The paper takes the norms out of the
    transformer; the sublayer's own pre-norm is kept here, so that only the residual differs between the arms of a
    comparison.

    Parameters: 1 scalar a sublayer. State: 1 tensor. Moves: 3 tensors a sublayer.
    """

    short_name: ClassVar[str] = "rezero"
    formula: ClassVar[str] = "h = x;  x <- x + alpha_l v"
    citation: ClassVar[str] = "ReZero, arXiv 2003.04887"

    @property
    def label(self) -> str:
        """Name for tables and legends."""
        return "ReZero"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with a factor; the output has none."""
        del dim, eps
        return Site() if index == num_sublayers else ReZeroSite(device=device, dtype=dtype)

    def gain(self, hidden: Tensor, site: Site, output: Tensor) -> Gain:
        """The sublayer's factor."""
        del hidden, output
        assert isinstance(site, ReZeroSite)
        return site.alpha
