"""The initial scale of a new model's projections, where a residual scheme asks for one (DeepNorm)."""

import torch
from torch import nn

SCALED = ("v_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
"""Projections of value, output and MLP by their last names; query and key projections keep their scale."""


def scale_projections(model: nn.Module, gain: float) -> None:
    """Multiply the weights of value, output and MLP projections by a factor."""
    if gain == 1.0:
        return
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not set(name.split(".")[-2:]).isdisjoint(SCALED):
                parameter.mul_(gain)
