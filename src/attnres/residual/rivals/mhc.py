"""Manifold-constrained hyper-connections: several streams, mixed by a doubly stochastic matrix."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.residual.site import Site
from attnres.residual.streams import MultiStream

OFF_DIAGONAL = -8.0
"""Where the logits of the mixing matrix start off the diagonal: streams hardly mix."""


@final
class StreamSite(Site):
    """The three maps of a site: of the streams to a read, of an output to the streams, and between streams.

    Each is a bias plus a small multiple of a projection of the normalised streams; the projections start at zero.
    """

    def __init__(self, dim: int, streams: int, mixing: Tensor, place: int, *, eps: float, device: Any, dtype: Any):
        super().__init__()
        self.eps, self.streams, self.place, self.initial_mixing = eps, streams, place, mixing
        options = {"device": device, "dtype": dtype}
        self.map_weight = nn.Parameter(torch.empty(2 * streams + len(mixing), streams * dim, **options))
        self.map_scale = nn.Parameter(torch.empty(3, **options))
        self.pre_bias = nn.Parameter(torch.empty(streams, **options))
        self.post_bias = nn.Parameter(torch.empty(streams, **options))
        self.res_bias = nn.Parameter(torch.empty(len(mixing), **options))
        if not self.map_scale.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Read from and write to one stream mainly, in turn with the sites, and leave the streams as they are."""
        nn.init.zeros_(self.map_weight)
        nn.init.constant_(self.map_scale, 0.01)
        with torch.no_grad():
            for bias in (self.pre_bias, self.post_bias):
                bias.fill_(-1.0)
                bias[self.place % self.streams] = 1.0
            self.res_bias.copy_(self.initial_mixing)

    def logits(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the three maps, ``[*batch, m]``, ``[*batch, m]`` and ``[*batch, len(mixing)]``, in float32."""
        wide = torch.promote_types(streams.dtype, torch.float32)
        flat = streams.to(wide).flatten(-2)
        normed = F.rms_norm(flat, flat.shape[-1:], eps=self.eps)
        sizes = (self.streams, self.streams, len(self.initial_mixing))
        with torch.autocast(streams.device.type, enabled=False):
            parts = (normed @ self.map_weight.to(wide).mT).split(sizes, dim=-1)
        biases = (self.pre_bias, self.post_bias, self.res_bias)
        pre, post, res = (
            scale * part + bias.to(wide)
            for scale, part, bias in zip(self.map_scale.to(wide), parts, biases, strict=True)
        )
        return pre, post, res


@final
@dataclass(frozen=True, kw_only=True)
class ManifoldHyperConnections(MultiStream):
    """mHC: ``h = pre^T X``, ``X <- res X + post v^T`` with ``res`` doubly stochastic by Sinkhorn's iteration.

    ``pre = sigmoid(.)``, ``post = 2 sigmoid(.)``, ``res = Sinkhorn(exp(.))``, each of a bias plus 0.01 times a
    projection of the normalised streams. The embedding is copied into every stream, and the output read is their sum.

    Parameters: m D (2m + m^2) + 2m + m^2 + 3 a site. State: m tensors. Moves: 3m + 2 tensors a sublayer, fused.
    """

    short_name: ClassVar[str] = "mhc"
    formula: ClassVar[str] = "h = pre^T X;  X <- res X + post v^T;  res = Sinkhorn(exp(.)) of the streams"
    citation: ClassVar[str] = "mHC, arXiv 2512.24880"

    streams: int = 4
    """Number of streams m."""
    sinkhorn_iterations: int = 20
    """Row and column normalisations that make the mixing matrix doubly stochastic."""

    def __post_init__(self) -> None:
        for name in ("streams", "sinkhorn_iterations"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; allowed is a whole number of 1 or more")

    @property
    def label(self) -> str:
        """Name and streams, for tables and legends."""
        return f"mHC ({self.streams} streams)"

    @property
    def num_streams(self) -> int:
        """How many streams there are."""
        return self.streams

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site that starts by leaving the streams apart; the output site, which sums them, has no parameters."""
        if index == num_sublayers:
            return Site()
        mixing = (OFF_DIAGONAL * (1 - torch.eye(self.streams, device="cpu"))).flatten()
        return StreamSite(dim, self.streams, mixing, index, eps=eps, device=device, dtype=dtype)

    def pre(self, streams: Tensor, site: Site) -> Tensor:
        """Sigmoids; ones at the output."""
        if not isinstance(site, StreamSite):
            return streams.new_ones(self.streams, dtype=torch.promote_types(streams.dtype, torch.float32))
        return site.logits(streams)[0].sigmoid()

    def res_post(self, streams: Tensor, site: Site, output: Tensor) -> tuple[Tensor, Tensor]:
        """A doubly stochastic matrix, and sigmoids from 0 to 2."""
        del output
        assert isinstance(site, StreamSite)
        _, post, res = site.logits(streams)
        res = sinkhorn(res.unflatten(-1, (self.streams, self.streams)), self.sinkhorn_iterations)
        return res.mT, 2 * post.sigmoid()


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """The doubly stochastic matrix near ``exp(logits)``, by normalising rows and columns in turn in the logarithm."""
    for _ in range(iterations):
        logits = logits - logits.logsumexp(-1, keepdim=True)
        logits = logits - logits.logsumexp(-2, keepdim=True)
    return logits.exp()
