"""KEEL: a post-norm residual whose stream is amplified by the depth, with a norm inside the sublayer too."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.residual.rivals.norms import norm_weight, rms_gain
from attnres.residual.site import Site
from attnres.residual.streams import Gain, SingleStream


@final
class KeelSite(Site):
    """A site with the post-norm of the sublayer before it, if there is one; its weight is one at the start."""

    stream_norm_weight: nn.Parameter | None

    def __init__(self, dim: int, alpha: float, *, normed: bool, eps: float, device: Any, dtype: Any):
        super().__init__()
        self.alpha, self.eps = alpha, eps
        self.stream_norm_weight = norm_weight(dim, device=device, dtype=dtype) if normed else None

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        if self.stream_norm_weight is not None:
            nn.init.ones_(self.stream_norm_weight)


@final
@dataclass(frozen=True, kw_only=True)
class Keel(SingleStream):
    """``x <- Norm(alpha x + f(Norm(x)))`` with ``alpha`` the number of sublayers.

    The inner norm is the sublayer's own. What is carried is the sum before its outer norm, which is applied at the
    next read and again at the next write: ``u <- alpha Norm(u) + v``. The first read has no outer norm before it, and
    the outer norm of the last sublayer is the model's final norm. Easy to get wrong: the count is of sublayers, twice
    that of decoder layers. It does not start as PreNorm's function. RMSNorm stands for LayerNorm.

    Parameters: D a sublayer but the first. State: 1 tensor. Moves: 5 tensors a sublayer.
    """

    short_name: ClassVar[str] = "keel"
    formula: ClassVar[str] = "h = x;  x <- Norm(alpha x + v);  alpha = number of sublayers"
    citation: ClassVar[str] = "KEEL, arXiv 2601.19895"

    alpha: float | None = None
    """By how much the stream is amplified before an output is added. None: the number of sublayers, as published."""

    def __post_init__(self) -> None:
        super().__post_init__()
        value = self.alpha
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, float | int) or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"alpha is {value!r}; allowed is a number above 0, or None for the number of sublayers")

    @property
    def label(self) -> str:
        """Name and factor, for tables and legends."""
        return "KEEL" if self.alpha is None else f"KEEL (alpha={self.alpha})"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with the outer norm of the sublayer before it; the first has none, and the output's is the model's."""
        alpha = float(num_sublayers if self.alpha is None else self.alpha)
        normed = 0 < index < num_sublayers
        return KeelSite(dim, alpha, normed=normed, eps=eps, device=device, dtype=dtype)

    def read_gain(self, hidden: Tensor, site: Site) -> Gain:
        """The outer norm of the sum."""
        assert isinstance(site, KeelSite)
        weight = site.stream_norm_weight
        return None if weight is None else rms_gain(hidden, weight, site.eps)

    def keep(self, hidden: Tensor, site: Site) -> Gain:
        """``alpha`` times what is read."""
        assert isinstance(site, KeelSite)
        weight = site.stream_norm_weight
        return site.alpha if weight is None else site.alpha * rms_gain(hidden, weight, site.eps)
