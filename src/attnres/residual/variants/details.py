"""Details of a block: the signs with which outputs go into them, and the site that reads them."""

from typing import Any, final

import torch
from torch import nn

from attnres.residual.site import DepthSite

Signs = tuple[float, float]
"""Weights of one output in the two detail sums of its block: phase and split."""


@final
class DetailSite(DepthSite):
    """A site with two score biases, one for each kind of detail, that start below zero."""

    def __init__(
        self, dim: int, *, kinds: tuple[int, ...], signs: Signs | None, start: float, eps: float, **options: Any
    ):
        super().__init__(dim, eps=eps, **options)
        self.kinds, self.signs, self.start = kinds, signs, start
        device, dtype = options["device"], options["dtype"]
        self.detail_bias = nn.Parameter(torch.full((2,), start, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """As AttnRes; biases below zero."""
        super().reset_parameters()
        nn.init.constant_(self.detail_bias, self.start)


def signs(place: int, first: int, length: int) -> Signs | None:
    """Weights of the output of sublayer ``place`` in the details of its block; None for a block of one."""
    if length < 2:
        return None
    attentions = sum(index % 2 == 0 for index in range(first, first + length))
    half = length // 2
    return _sign(place % 2 == 0, attentions, length), _sign(place - first < half, half, length)


def _sign(here: bool, count: int, length: int) -> float:
    """Weight of an output on one of two sides, so that all of a block sum to zero; plus or minus 1 if even."""
    return length / (2 * count) if here else -length / (2 * (length - count))
