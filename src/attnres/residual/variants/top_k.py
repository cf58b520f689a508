"""AttnRes that reads a few sources only: those with the highest scores."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from attnres.errors import ConfigError
from attnres.ops.stacked import scores
from attnres.residual.history import AttnResVariant
from attnres.residual.site import DepthSite, Site
from attnres.residual.state import History


@final
@dataclass(frozen=True, kw_only=True)
class TopK(AttnResVariant):
    """``h = sum_i softmax_{i in K} (s_i) v_i`` with K the k sources of the highest scores, chosen for each token.

    Of equal scores the newer source is kept, so the choice is the same on every machine. With zero queries all scores
    are equal: the model starts by reading the k newest sources, which is not PreNorm. Gradients flow through the kept
    sources alone; a source that is left out gets in when the query turns to what is kept less.

    Parameters, state and moves: as AttnRes in one phase; a kernel may leave the values of the others unread.
    """

    scores_every_tensor: ClassVar[bool] = True
    short_name: ClassVar[str] = "top-k"
    formula: ClassVar[str] = "h = sum_i softmax_{i in the k highest} (<w, norm(v_i) g>) v_i"
    citation: ClassVar[str] = "this project"

    k: int = 4
    """Sources that a read keeps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1:
            raise ConfigError(f"k is {self.k!r}; allowed is a whole number of 1 or more")

    @property
    def label(self) -> str:
        """Name, form and k, for tables and legends."""
        return f"{self.form} AttnRes, top {self.k}"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with a zero pseudo-query and a key weight of ones."""
        closes_block = self.closes_block(index, num_sublayers)
        return DepthSite(dim, eps=eps, closes_block=closes_block, device=device, dtype=dtype)

    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """Softmax of the kept scores; exactly zero elsewhere."""
        del state
        assert isinstance(site, DepthSite)
        raw = scores(stacked, site.folded(stacked.dtype), site.eps)
        order = torch.sort(raw.detach().flip(-1), dim=-1, descending=True, stable=True).indices  # newest first
        kept = raw.shape[-1] - 1 - order[..., : self.k]
        left_out = torch.ones_like(raw, dtype=torch.bool).scatter(-1, kept, False)
        return raw.masked_fill(left_out, float("-inf")).softmax(-1)[..., None, :, None]

    def _out_scale(self, state: History) -> float:
        return min(super()._out_scale(state), float(self.k))
