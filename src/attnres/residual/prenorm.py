"""PreNorm: the fixed residual sum, the baseline of every comparison."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from attnres.residual.schedule import Source
from attnres.residual.state import RunningSum
from attnres.residual.strategy import Site, Strategy


@final
@dataclass(frozen=True, kw_only=True)
class PreNorm(Strategy):
    """The standard residual: every read is the plain sum of the embedding and all outputs so far.

    ``h_l = h_{l-1} + f_{l-1}(h_{l-1})``. No parameters; the state is one tensor per token.
    """

    short_name: ClassVar[str] = "prenorm"

    @property
    def label(self) -> str:
        """Name for tables and legends."""
        return "PreNorm"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site without parameters."""
        del index, num_sublayers, dim, eps, device, dtype
        return Site()

    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """One source: everything so far, summed."""
        del num_sublayers
        return (Source(embedding=True, first=0, stop=site),)

    def start(self, embedding: Tensor) -> RunningSum:
        """The embedding is the sum so far."""
        return RunningSum(embedding)

    def read(self, state: RunningSum, site: Site) -> Tensor:
        """The sum so far."""
        del site
        return state.hidden

    def write(self, state: RunningSum, site: Site, output: Tensor) -> RunningSum:
        """Add the output to the sum."""
        del site
        return RunningSum(state.hidden + output)

    def depth_weights(self, state: RunningSum, site: Site) -> Tensor:
        """One source, weight 1."""
        del site
        return torch.ones_like(state.hidden[..., :1])
