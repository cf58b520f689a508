"""Random initial values of what a strategy learns, where zeros would leave it without a gradient."""

import torch
from torch import Tensor

_STRIDE = 1_000_003
"""Keeps the places of one seed apart from those of the next."""


def draw_normal(parameter: Tensor, *, std: float, place: int) -> None:
    """Fill a parameter with normal numbers that depend on the seed of the run and on ``place`` only.

    They are the same however and whenever the parameter comes to be, and they leave the random state alone, so a model
    draws the same base weights and the same data with and without them.

    Args:
        parameter: What to fill, in place; on the meta device there is nothing to fill.
        std: Standard deviation.
        place: A number that no other parameter of the model has.
    """
    if parameter.is_meta:
        return
    generator = torch.Generator("cpu").manual_seed((torch.initial_seed() * _STRIDE + place) % 2**63)
    values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        parameter.copy_(values * std)
