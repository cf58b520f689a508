"""What mHC and mHC-lite share: streams with constrained maps, made from all streams of a token together."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.ops.precision import without_autocast
from attnres.residual.site import Site
from attnres.residual.streams import MultiStream

SCALE = 0.01
"""Where the factors of the projections start."""
UNLIKELY = -8.0
"""Where the logits start of what is not the identity: streams hardly mix."""


@dataclass(frozen=True, kw_only=True)
class ConstrainedStreams(MultiStream):
    """Base of mHC and mHC-lite. A derived class says how a row of logits becomes a doubly stochastic matrix."""

    streams: int = 4
    """Number of streams m."""

    @property
    def num_streams(self) -> int:
        """How many streams there are."""
        return self.streams

    @abstractmethod
    def initial_mixing(self) -> Tensor:
        """Where the logits of the mixing matrix start, as one row."""

    @abstractmethod
    def doubly_stochastic(self, logits: Tensor) -> Tensor:
        """The matrix ``[*batch, m, m]`` of a row of logits; first axis the old streams, second the new ones."""

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site that starts by leaving the streams apart; the output site, which sums them, has no parameters."""
        if index == num_sublayers:
            return Site()
        return StreamSite(dim, self.streams, self.initial_mixing(), index, eps=eps, device=device, dtype=dtype)

    def pre(self, streams: Tensor, site: Site) -> Tensor:
        """Sigmoids; ones at the output."""
        if not isinstance(site, StreamSite):
            return streams.new_ones(self.streams, dtype=torch.promote_types(streams.dtype, torch.float32))
        return site.logits(streams)[0].sigmoid()

    def res_post(self, streams: Tensor, site: Site, output: Tensor) -> tuple[Tensor, Tensor]:
        """A doubly stochastic matrix, and sigmoids from 0 to 2."""
        del output
        assert isinstance(site, StreamSite)
        _, post, mixing = site.logits(streams)
        return self.doubly_stochastic(mixing).mT, 2 * post.sigmoid()


class StreamSite(Site):
    """The three maps of a site: of the streams to a read, of an output to the streams, and between streams.

    Each is a bias plus a small multiple of a projection of the normalised streams; the projections start at zero. Rows
    of `map_weight` are in the order pre, post, mixing.
    """

    reads_evenly: bool = False
    """Whether a read starts with equal weights of the streams instead of one stream mainly."""

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
        nn.init.constant_(self.map_scale, SCALE)
        with torch.no_grad():
            for bias in (self.pre_bias, self.post_bias):
                bias.fill_(-1.0)
                bias[self.place % self.streams] = 1.0
            if self.reads_evenly:
                self.pre_bias.zero_()
            self.res_bias.copy_(self.initial_mixing)

    def logits(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the three maps, ``[*batch, m]``, ``[*batch, m]`` and ``[*batch, len(mixing)]``, in float32."""
        sizes = (self.streams, self.streams, len(self.initial_mixing))
        parts = project(streams, self.map_weight, self.eps).split(sizes, dim=-1)
        biases = (self.pre_bias, self.post_bias, self.res_bias)
        scales = self.map_scale.to(parts[0].dtype)
        pre, post, mixing = (
            scale * part + bias.to(part.dtype) for scale, part, bias in zip(scales, parts, biases, strict=True)
        )
        return pre, post, mixing


class HeadSite(Site):
    """The map of the streams to the output read: one bias a stream, plus a multiple of a projection of the streams."""

    def __init__(self, dim: int, streams: int, *, eps: float, device: Any, dtype: Any):
        super().__init__()
        self.eps = eps
        self.map_weight = nn.Parameter(torch.zeros(streams, streams * dim, device=device, dtype=dtype))
        self.map_scale = nn.Parameter(torch.full((1,), SCALE, device=device, dtype=dtype))
        self.pre_bias = nn.Parameter(torch.zeros(streams, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """The same weight for every stream: half their sum."""
        nn.init.zeros_(self.map_weight)
        nn.init.constant_(self.map_scale, SCALE)
        nn.init.zeros_(self.pre_bias)

    def logits(self, streams: Tensor) -> Tensor:
        """Logits of the streams' weights, ``[*batch, m]``, in float32."""
        part = project(streams, self.map_weight, self.eps)
        return self.map_scale.to(part.dtype) * part + self.pre_bias.to(part.dtype)


def project(streams: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight`` times the streams ``[*batch, m, dim]`` of a token, normalised together, in float32."""
    flat = streams.to(torch.promote_types(streams.dtype, torch.float32)).flatten(-2)
    normed = F.rms_norm(flat, flat.shape[-1:], eps=eps)
    with without_autocast(streams):
        return normed @ weight.to(flat.dtype).mT
