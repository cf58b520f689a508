"""State and sites of MUDDFormer."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attnres.residual.drawing import draw_normal
from attnres.residual.site import Site


@final
@dataclass(frozen=True)
class LayerOutputs:
    """The outputs of whole decoder layers, and the running sum inside one."""

    finished: tuple[Tensor, ...]
    """The embedding and each layer's output (its residual stream included), ``[*batch, dim]``."""
    hidden: Tensor | None = None
    """Residual stream plus attention; absent between layers."""


pytree.register_dataclass(LayerOutputs, field_names=["finished", "hidden"])


@final
class DenseSite(Site):
    """A small MLP that makes weights of all layer outputs from the newest, and a static part, one for the newest."""

    def __init__(self, dim: int, outputs: int, streams: int, hidden: int, place: int, *, eps: float, **options: Any):
        super().__init__()
        self.eps, self.streams, self.place = eps, streams, place
        self.in_weight = nn.Parameter(torch.empty(hidden, dim, **options))
        self.out_weight = nn.Parameter(torch.empty(streams * outputs, hidden, **options))
        self.static_weight = nn.Parameter(torch.empty(streams, outputs, **options))
        if not self.static_weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """The newest output alone: a plain residual."""
        draw_normal(self.in_weight, std=self.in_weight.shape[-1] ** -0.5, place=self.place)
        nn.init.zeros_(self.out_weight)
        with torch.no_grad():
            self.static_weight.zero_()
            self.static_weight[:, -1] = 1.0
