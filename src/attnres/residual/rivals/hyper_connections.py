"""Hyper-connections: several streams with learned, token-dependent maps and no constraint on them."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.ops.precision import without_autocast
from attnres.residual.site import Site
from attnres.residual.streams import MultiStream

SCALE = 0.01
"""Where the factors of the dynamic part start."""


@final
class HyperSite(Site):
    """The maps of a site: static values, and the projections of each normalised stream that vary them by token.

    ``mix`` has the old streams on its first axis and the new ones on its second. Projections start at zero.
    """

    def __init__(self, dim: int, streams: int, place: int, *, dynamic: bool, eps: float, device: Any, dtype: Any):
        super().__init__()
        self.eps, self.place, self.dynamic = eps, place, dynamic
        options = {"device": device, "dtype": dtype}
        self.static_read = nn.Parameter(torch.empty(streams, **options))
        self.static_mix = nn.Parameter(torch.empty(streams, streams, **options))
        self.static_write = nn.Parameter(torch.empty(streams, **options))
        if dynamic:
            self.map_weight = nn.Parameter(torch.empty(streams + 2, dim, **options))  # rows: read, mix, write
            self.map_scale = nn.Parameter(torch.empty(2, **options))  # of read and mix, and of write
        if not self.static_read.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Read one stream, in turn with the sites; write to all; leave them as they are."""
        with torch.no_grad():
            self.static_read.zero_()
            self.static_read[self.place % len(self.static_read)] = 1.0
            nn.init.eye_(self.static_mix)
            nn.init.ones_(self.static_write)
            if self.dynamic:
                nn.init.zeros_(self.map_weight)
                nn.init.constant_(self.map_scale, SCALE)


@final
@dataclass(frozen=True, kw_only=True)
class HyperConnections(MultiStream):
    """HC: ``h = A_m^T H``, ``H <- A_r^T H + B v^T``, H of m streams.

    Dynamic (DHC): ``A = A_static + s_a tanh(norm(H) W)`` and ``B = B_static + s_b tanh(norm(H) W_b)``, where row s of
    the tanh is made of stream s alone (mHC takes all streams together). ``W = 0`` and ``s = 0.01`` at the start, where
    A_m of the k-th sublayer picks stream k mod m, A_r is the identity and B is one: every stream is the residual sum,
    so the model is PreNorm's function; the output read, the sum of the streams, is m times PreNorm's.

    The norm is RMSNorm without a weight, which W absorbs (the paper's code has LayerNorm). The paper scales the output
    projections of its 7B models for the m-fold output; here they stay those of the base model.

    Parameters: m^2 + 2m a site, and D (m + 2) + 2 if dynamic. State: m tensors. Moves: 3m + 2 tensors a sublayer,
    fused.
    """

    short_name: ClassVar[str] = "hyper-connections"
    formula: ClassVar[str] = "h = A_m^T H;  H <- A_r^T H + B v^T;  A, B static + 0.01 tanh(norm(H) W)"
    citation: ClassVar[str] = "Hyper-Connections, arXiv 2409.19606"

    streams: int = 4
    """Number of streams m (the paper's expansion rate n)."""
    dynamic: bool = True
    """Whether the maps vary with the token (DHC), or are the same for all (SHC)."""
    tanh: bool = True
    """Whether the varying part goes through a tanh; without effect if not dynamic."""

    def __post_init__(self) -> None:
        super().__post_init__()
        count = self.streams
        if count < 1:
            raise ConfigError(f"streams is {count!r}; allowed is a whole number of 1 or more")

    @property
    def label(self) -> str:
        """Name and streams, for tables and legends."""
        return f"{'' if self.dynamic else 'static '}hyper-connections ({self.streams} streams)"

    @property
    def num_streams(self) -> int:
        """How many streams there are."""
        return self.streams

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site that starts as PreNorm; the output site, which sums the streams, has no parameters."""
        if index == num_sublayers:
            return Site()
        return HyperSite(dim, self.streams, index, dynamic=self.dynamic, eps=eps, device=device, dtype=dtype)

    def pre(self, streams: Tensor, site: Site) -> Tensor:
        """``A_m``; ones at the output."""
        wide = torch.promote_types(streams.dtype, torch.float32)
        if not isinstance(site, HyperSite):
            return streams.new_ones(self.streams, dtype=wide)
        static = site.static_read.to(wide)
        if not self.dynamic:
            return static.expand(streams.shape[:-1])
        varied = self._varied(streams, site, slice(0, 1)).squeeze(-1)
        return static + site.map_scale[0].to(wide) * varied

    def res_post(self, streams: Tensor, site: Site, output: Tensor) -> tuple[Tensor, Tensor]:
        """``A_r^T`` and ``B``."""
        del output
        assert isinstance(site, HyperSite)
        wide = torch.promote_types(streams.dtype, torch.float32)
        # given to each token, since a matrix shared by all would make `matmul` lay the streams out anew
        mix = site.static_mix.to(wide).expand(*streams.shape[:-1], -1)
        write = site.static_write.to(wide).expand(streams.shape[:-1])
        if self.dynamic:
            varied = self._varied(streams, site, slice(1, None))
            scale = site.map_scale.to(wide)
            mix, write = mix + scale[0] * varied[..., :-1], write + scale[1] * varied[..., -1]
        return mix.mT, write

    def _varied(self, streams: Tensor, site: HyperSite, rows: slice) -> Tensor:
        """``tanh(norm(H) W)`` for some rows of the weight, ``[*batch, m, rows]``, in float32."""
        wide = streams.to(torch.promote_types(streams.dtype, torch.float32))
        normed = F.rms_norm(wide, wide.shape[-1:], eps=site.eps)
        with without_autocast(streams):
            raw = normed @ site.map_weight[rows].to(wide.dtype).mT
        return raw.tanh() if self.tanh else raw
