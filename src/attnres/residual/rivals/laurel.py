"""LAuReL with residual weights: two learned factors per sublayer, one for the stream and one for the output."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.residual.site import Site
from attnres.residual.streams import Gain, SingleStream

Normalization = Literal["softmax", "sigmoid", "none"]


@final
class LaurelSite(Site):
    """The two factors of a sublayer, or what they are made of: the stream's and the output's."""

    def __init__(self, start: tuple[float, float], normalization: Normalization, *, device: Any, dtype: Any):
        super().__init__()
        self.start, self.normalization = start, normalization
        self.mix_weight = nn.Parameter(torch.empty(2, device=device, dtype=dtype))
        if not self.mix_weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the two to where they start."""
        with torch.no_grad():
            for index, value in enumerate(self.start):
                self.mix_weight[index] = value

    def factors(self, like: Tensor) -> Tensor:
        """Factor of the stream and of the output, ``[2]``, in float32 (float64 for float64 streams)."""
        weight = self.mix_weight.to(torch.promote_types(like.dtype, torch.float32))
        if self.normalization == "softmax":
            return weight.softmax(0)
        return weight.sigmoid() if self.normalization == "sigmoid" else weight


@final
@dataclass(frozen=True, kw_only=True)
class Laurel(SingleStream):
    """LAuReL-RW: ``x <- beta_l x + alpha_l f_l(Norm(x))`` with two learned scalars for each sublayer.

    The paper finds that they must not grow without bound and names softmax and sigmoid; which, and where they start,
    it leaves open. Here the l-th sublayer starts with ``beta = l/(l+1)`` and ``alpha = 1/(l+1)``, the mean of the
    embedding and all outputs, which is PreNorm's function up to the norms' eps. Equal factors would forget the
    embedding at a rate of 2 per sublayer. The low-rank and previous-activation parts of LAuReL are not here.

    Parameters: 2 scalars a sublayer. State: 1 tensor. Moves: 3 tensors a sublayer.
    """

    short_name: ClassVar[str] = "laurel"
    formula: ClassVar[str] = "h = x;  x <- beta_l x + alpha_l v"
    citation: ClassVar[str] = "LAuReL, arXiv 2411.07501"

    normalization: Normalization = "softmax"
    """``"softmax"``: the two sum to one. ``"sigmoid"``: each is between 0 and 1. ``"none"``: free, 1 at the start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalization not in ("softmax", "sigmoid", "none"):
            raise ConfigError(f'normalization is {self.normalization!r}; allowed are "softmax", "sigmoid" and "none"')

    @property
    def label(self) -> str:
        """Name and bound, for tables and legends."""
        return f"LAuReL-RW ({self.normalization})" if self.normalization != "none" else "LAuReL-RW (free)"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with two factors; the output has none."""
        del dim, eps
        if index == num_sublayers:
            return Site()
        log = math.log(index + 1)
        starts = {"softmax": (log, 0.0), "sigmoid": (log, -log), "none": (1.0, 1.0)}
        return LaurelSite(starts[self.normalization], self.normalization, device=device, dtype=dtype)

    def keep(self, hidden: Tensor, site: Site) -> Gain:
        """``beta``."""
        assert isinstance(site, LaurelSite)
        return site.factors(hidden)[:1]

    def gain(self, hidden: Tensor, site: Site, output: Tensor) -> Gain:
        """``alpha``."""
        del output
        assert isinstance(site, LaurelSite)
        return site.factors(hidden)[1:]
