"""RMSNorm as a factor: what a strategy that normalises its stream multiplies it by."""

import torch
from torch import Tensor, nn

from attnres.ops.stacked import inverse_rms
from attnres.residual.site import Site


def rms_gain(value: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight / rms(value)``, so that the normalised value is this times the value: ``[*batch, dim]``, in float32."""
    wide = torch.promote_types(value.dtype, torch.float32)
    return inverse_rms(value.to(wide), eps)[..., None] * weight.to(wide)


def own_norm_gain(value: Tensor, site: Site) -> Tensor:
    """`rms_gain` of the norm that belongs to the sublayer at a site (`Site.takes_norm`)."""
    (norm,) = site.norm
    weight, eps = norm.weight, norm.variance_epsilon
    assert isinstance(weight, Tensor)
    assert isinstance(eps, float)
    return rms_gain(value, weight, eps)


def norm_weight(dim: int, *, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Parameter:
    """The weight of a norm that a strategy adds: ones."""
    return nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
