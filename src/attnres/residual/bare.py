"""A residual path without a model, to look at what a strategy does: how much it moves, what crosses a cut."""

import torch
from torch import Tensor, nn

from attnres.residual.residual import Residual
from attnres.residual.strategy import Strategy


class _Norm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(dim)), 1e-6

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)


def bare_residual(strategy: Strategy, num_sublayers: int, dim: int) -> Residual:
    """The residual path of a model of a depth and width, on the default device, in evaluation mode.

    Raises:
        ConfigError: The strategy does not fit depth or width.
    """
    norms = [_Norm(dim) for _ in range(num_sublayers)]
    return Residual(strategy, num_sublayers, dim, norms=norms).eval()
