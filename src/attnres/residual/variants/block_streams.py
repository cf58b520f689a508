"""The site of a sublayer whose block is kept in several streams."""

from typing import Any, final

import torch
from torch import nn

from attnres.residual.rivals.constrained import UNLIKELY, StreamSite
from attnres.residual.site import DepthSite


@final
class BlockStreamSite(DepthSite):
    """A site of depth attention with mHC's maps, or, where a block begins and there are no streams, with one bias."""

    def __init__(self, dim: int, streams: int, place: int, *, first: bool, eps: float, **options: Any):
        super().__init__(dim, eps=eps, **options)
        self.streams, self.place = streams, place
        device, dtype = options["device"], options["dtype"]
        self.maps: StreamSite | None = None
        if first:
            self.post_bias = nn.Parameter(torch.zeros(streams, device=device, dtype=dtype))
        else:
            mixing = (UNLIKELY * (1 - torch.eye(streams, device="cpu"))).flatten()
            self.maps = StreamSite(dim, streams, mixing, place, eps=eps, device=device, dtype=dtype)
            self.maps.reads_evenly = True
        if not self.pseudo_query.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """As AttnRes and as mHC, but that a read starts with equal weights of the streams."""
        super().reset_parameters()
        with torch.no_grad():
            if self.maps is None:
                self.post_bias.fill_(-1.0)
                self.post_bias[self.place % self.streams] = 1.0
            else:
                self.maps.reset_parameters()
