"""LayerScale: one learned factor per sublayer and channel, small at the start."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.residual.site import Site
from attnres.residual.streams import Gain, SingleStream


@final
class LayerScaleSite(Site):
    """A sublayer's factors, one per channel."""

    def __init__(self, dim: int, start: float, *, device: Any, dtype: Any):
        super().__init__()
        self.start = start
        self.channel_scale = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        if not self.channel_scale.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every factor to where it starts."""
        nn.init.constant_(self.channel_scale, self.start)


@final
@dataclass(frozen=True, kw_only=True)
class LayerScale(SingleStream):
    """``x <- x + diag(lambda_l) f_l(Norm(x))`` with small factors at the start, so that every sublayer is near nothing.

    The depth that decides on the start is counted in decoder layers, not sublayers.

    Parameters: D a sublayer. State: 1 tensor. Moves: 3 tensors a sublayer.
    """

    short_name: ClassVar[str] = "layerscale"
    formula: ClassVar[str] = "h = x;  x <- x + diag(lambda_l) v"
    citation: ClassVar[str] = "CaiT, arXiv 2103.17239"

    init: float | None = 1e-4
    """Where the factors start. None: by depth, as published: 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 beyond."""

    def __post_init__(self) -> None:
        super().__post_init__()
        value = self.init
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, float | int) or not math.isfinite(value) or value < 0:
            raise ConfigError(f"init is {value!r}; allowed is a number of 0 or more, or None for a start by depth")

    @property
    def label(self) -> str:
        """Name and start, for tables and legends."""
        return f"LayerScale ({'by depth' if self.init is None else self.init})"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with factors; the output has none."""
        del eps
        if index == num_sublayers:
            return Site()
        start = start_by_depth(num_sublayers) if self.init is None else float(self.init)
        return LayerScaleSite(dim, start, device=device, dtype=dtype)

    def gain(self, hidden: Tensor, site: Site, output: Tensor) -> Gain:
        """The sublayer's factors."""
        del hidden, output
        assert isinstance(site, LayerScaleSite)
        return site.channel_scale


def start_by_depth(num_sublayers: int) -> float:
    """The published start for a depth: deeper models start with smaller factors."""
    if num_sublayers <= 2 * 18:
        return 0.1
    return 1e-5 if num_sublayers <= 2 * 24 else 1e-6
