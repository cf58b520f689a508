"""Highway: a gate between the stream and the output, made of the stream."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.ops.precision import without_autocast
from attnres.residual.site import Site
from attnres.residual.streams import Gain, SingleStream


@final
class HighwaySite(Site):
    """The gate of a sublayer: a projection of the normalised stream, zero at the start, and a bias."""

    def __init__(self, dim: int, gates: int, bias: float, *, eps: float, device: Any, dtype: Any):
        super().__init__()
        self.eps, self.start = eps, bias
        self.gate_weight = nn.Parameter(torch.empty(gates, dim, device=device, dtype=dtype))
        self.gate_bias = nn.Parameter(torch.empty(gates, device=device, dtype=dtype))
        if not self.gate_weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """A gate that is the same for every token."""
        nn.init.zeros_(self.gate_weight)
        nn.init.constant_(self.gate_bias, self.start)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the gate, ``[*batch, gates]``, in float32 (float64 for float64 streams)."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        with without_autocast(hidden):
            normed = F.rms_norm(hidden.to(wide), hidden.shape[-1:], eps=self.eps)
            return F.linear(normed, self.gate_weight.to(wide), self.gate_bias.to(wide))


@final
@dataclass(frozen=True, kw_only=True)
class Highway(SingleStream):
    """``x <- (1 - g) x + g f(Norm(x))`` with ``g = sigmoid(<w, norm(x)> + b)`` for each token.

    The weights of a read sum to one: it is a stick-breaking average of the embedding and all outputs. The weight
    ``w`` starts at zero, and the bias negative, so that the stream is carried. By default the l-th sublayer's bias
    starts at ``-log(l)``, where ``g = 1/(l+1)`` and the stream is the mean of everything so far, PreNorm's function
    up to the norms' eps. A fixed negative bias, as in the paper (-1 to -10, deeper models lower), keeps most of the
    embedding instead. The gate of the paper is one per channel, from the stream as it is; here it is made of the
    normalised stream, which keeps its range whatever the width, and the sublayer's own pre-norm is kept.

    Parameters: D + 1 a sublayer; D^2 + D with gates per channel. State: 1 tensor. Moves: 3 tensors a sublayer.
    """

    short_name: ClassVar[str] = "highway"
    formula: ClassVar[str] = "h = x;  x <- (1-g) x + g v;  g = sigmoid(<w, norm(x)> + b)"
    citation: ClassVar[str] = "Highway Networks, arXiv 1505.00387"

    per_channel: bool = False
    """A gate for each channel, from a D x D projection, in place of one for all."""
    gate_bias: float | None = None
    """Where the bias starts; the paper's is negative. None: ``-log(l)`` for the l-th sublayer, PreNorm's function."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.per_channel, bool):
            raise ConfigError(f"per_channel is {self.per_channel!r}; allowed are True and False")
        value = self.gate_bias
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, float | int) or not math.isfinite(value):
            raise ConfigError(f"gate_bias is {value!r}; allowed is a number, or None for a start as PreNorm")

    @property
    def label(self) -> str:
        """Name and kind of gate, for tables and legends."""
        return "Highway (gates per channel)" if self.per_channel else "Highway"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with a gate; the output has none."""
        if index == num_sublayers:
            return Site()
        bias = -math.log(index + 1) if self.gate_bias is None else float(self.gate_bias)
        gates = dim if self.per_channel else 1
        return HighwaySite(dim, gates, bias, eps=eps, device=device, dtype=dtype)

    def keep(self, hidden: Tensor, site: Site) -> Gain:
        """``1 - g``, without the cancellation where g is near 1."""
        assert isinstance(site, HighwaySite)
        return (-site.logits(hidden)).sigmoid()

    def gain(self, hidden: Tensor, site: Site, output: Tensor) -> Gain:
        """``g``."""
        del output
        assert isinstance(site, HighwaySite)
        return site.logits(hidden).sigmoid()
