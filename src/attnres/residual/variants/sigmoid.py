"""AttnRes with sigmoids in place of the softmax: sources do not compete (paper, Table 4)."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor

from attnres.ops.stacked import scores
from attnres.residual.history import AttnResVariant
from attnres.residual.site import DepthSite, Site
from attnres.residual.state import History


@final
@dataclass(frozen=True, kw_only=True)
class SigmoidAttnRes(AttnResVariant):
    """``h = sum_i sigmoid(s_i) v_i`` with the scores of AttnRes (paper, Table 4, 1.741).

    Whether the weights are divided by their sum the paper leaves open: both are options. With zero queries every weight
    is 1/2, so the model starts as half the residual sum, which the norm that follows does not see; ``read_scale="sum"``
    doubles it.

    Parameters, state and moves: as AttnRes in one phase.
    """

    short_name: ClassVar[str] = "sigmoid"
    formula: ClassVar[str] = "h = sum_i sigmoid(<w, norm(v_i) g>) v_i"
    citation: ClassVar[str] = "Attention Residuals, arXiv 2603.15031, Table 4"

    renormalize: bool = False
    """Whether the weights of a read are divided by their sum."""

    @property
    def label(self) -> str:
        """Name and form, for tables and legends."""
        return f"{self.form} AttnRes, sigmoid" + (" (renormalised)" if self.renormalize else "")

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with a zero pseudo-query and a key weight of ones."""
        closes_block = self.closes_block(index, num_sublayers)
        return DepthSite(dim, eps=eps, closes_block=closes_block, device=device, dtype=dtype)

    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """Sigmoid of the scores."""
        del state
        assert isinstance(site, DepthSite)
        weights = scores(stacked, site.folded(stacked.dtype), site.eps).sigmoid()
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights[..., None, :, None]

    def _out_scale(self, state: History) -> float:
        if self.renormalize or self.read_scale != "sum":
            return super()._out_scale(state)
        return 2.0
