"""HybridNorm: norms on queries, keys and values in attention, and post-norm around the MLP."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.residual.rivals.norms import own_norm_gain
from attnres.residual.site import Site
from attnres.residual.state import RunningSum
from attnres.residual.strategy import stream_dtype
from attnres.residual.streams import Gain, SingleStream


@final
class ProjectionNormSite(Site):
    """A site whose attention normalises its projections head by head.

    How wide a head is only the attention knows: `attnres.models.attention` adds the weights, ones at the start.
    """

    def __init__(self, *, eps: float, device: Any, dtype: Any):
        super().__init__()
        self.eps, self.options = eps, {"device": device, "dtype": dtype}
        for name in ("q_proj", "k_proj", "v_proj"):
            self.register_parameter(f"{name}_norm_weight", None)

    def add_norm(self, projection: str, head_dim: int) -> None:
        """Give a projection the norm of its heads; one weight is shared by all of them."""
        weight = nn.Parameter(torch.ones(head_dim, **self.options))
        self.register_parameter(f"{projection}_norm_weight", weight)

    def normalize(self, projection: str, value: Tensor) -> Tensor:
        """RMSNorm of each head of a projection's output ``[*batch, heads * head_dim]``."""
        weight = getattr(self, f"{projection}_norm_weight")
        wide = torch.promote_types(value.dtype, torch.float32)
        heads = value.to(wide).unflatten(-1, (-1, weight.shape[0]))
        return F.rms_norm(heads, weight.shape, weight.to(wide), self.eps).flatten(-2).to(value.dtype)

    def reset_parameters(self) -> None:
        """Set the weights to ones."""
        for weight in self.parameters():
            nn.init.ones_(weight)


@final
@dataclass(frozen=True, kw_only=True)
class HybridNorm(SingleStream):
    """``y = x + attention(x)`` with norms on q, k and v, then ``x <- Norm(y) + MLP(Norm(y))``.

    Attention reads the stream as it is; its queries, keys and values are normalised per head after the projection and
    before RoPE. The norm before the attention has no part in it: it stays in the model under its name, so that
    checkpoints fit, with ``requires_grad`` off. Easy to get wrong: the post-norm stands between attention and MLP,
    and both the MLP and the addition take the normalised stream. HybridNorm* (``first_prenorm``) keeps the first
    layer's two norms where they are in PreNorm, with the norms on q, k and v. Families whose attention has no
    separate projections are refused; where a family normalises queries and keys itself (Qwen3), its own norms serve
    and only values get one.

    Parameters: 3 head widths an attention. State: 1 tensor. Moves: 4 tensors a sublayer.
    """

    short_name: ClassVar[str] = "hybridnorm"
    formula: ClassVar[str] = "y = x + attention with norms on q, k, v;  x <- Norm(y) + MLP(Norm(y))"
    citation: ClassVar[str] = "HybridNorm, arXiv 2503.04598"

    first_prenorm: bool = False
    """HybridNorm*: the first decoder layer is pre-norm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.first_prenorm, bool):
            raise ConfigError(f"first_prenorm is {self.first_prenorm!r}; allowed are True and False")

    @property
    def label(self) -> str:
        """Name for tables and legends."""
        return "HybridNorm*" if self.first_prenorm else "HybridNorm"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site whose projections are normalised, at attention; one without parameters elsewhere."""
        del dim
        is_attention = index < num_sublayers and index % 2 == 0
        return ProjectionNormSite(eps=eps, device=device, dtype=dtype) if is_attention else Site()

    def takes_norm(self, index: int, num_sublayers: int) -> bool:
        """Every sublayer's norm, but those of a first layer that is pre-norm."""
        return index < num_sublayers and not (self.first_prenorm and index < 2)

    def read(self, state: RunningSum, site: Site) -> Tensor:
        """The stream, or its norm; under autocast in the dtype of the projections, which take it without a norm."""
        value = super().read(state, site)
        dtype = stream_dtype(value) if site.takes_norm else None
        return value if dtype is None else value.to(dtype)

    def read_gain(self, hidden: Tensor, site: Site) -> Gain:
        """The norm of the stream at an MLP; attention reads it as it is."""
        return own_norm_gain(hidden, site) if site.takes_norm and site.index % 2 else None

    def keep(self, hidden: Tensor, site: Site) -> Gain:
        """What is read is what the output is added to, but in a first layer that is pre-norm."""
        return self.read_gain(hidden, site)
