"""Sites of Deep Delta Learning."""

from math import log
from typing import Any, final

import torch
from torch import nn

from attnres.residual.drawing import draw_normal
from attnres.residual.site import Site


@final
class ReadSite(Site):
    """How several streams become one read: a learned weight each, at start their mean."""

    def __init__(self, streams: int, *, device: Any, dtype: Any):
        super().__init__()
        self.read_weight = nn.Parameter(torch.full((streams,), 1 / streams, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """The mean of the streams."""
        nn.init.constant_(self.read_weight, 1 / len(self.read_weight))


@final
class DeltaSite(Site):
    """A read weight per stream, and the projections that make the gate and the values; what is not needed is None."""

    def __init__(
        self,
        dim: int,
        streams: int,
        place: int,
        *,
        beta_start: float,
        beta_hidden: int,
        projects_values: bool,
        eps: float,
        device: Any,
        dtype: Any,
    ):
        super().__init__()
        self.eps, self.place, self.beta_start = eps, place, beta_start

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.read_weight = parameter(streams) if streams > 1 else None
        self.beta_in = parameter(beta_hidden, dim) if beta_hidden else None
        self.beta_weight, self.beta_bias = parameter(beta_hidden or dim), parameter(1)
        self.value_weight = parameter(streams, dim) if projects_values else None
        self.value_bias = parameter(streams) if projects_values else None
        self.std = 0.5 * dim**-0.5
        if not self.beta_weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small random projections; a gate around ``beta_start``; a read as the mean of the streams."""
        for number, weight in enumerate((self.beta_in, self.beta_weight, self.value_weight)):
            if weight is not None:
                draw_normal(weight, std=self.std, place=3 * self.place + number)
        nn.init.constant_(self.beta_bias, log(self.beta_start / (2 - self.beta_start)))
        if self.value_bias is not None:
            nn.init.zeros_(self.value_bias)
        if self.read_weight is not None:
            nn.init.constant_(self.read_weight, 1 / len(self.read_weight))
