"""SiameseNorm: a post-norm stream and a pre-norm stream that share every sublayer."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.residual.rivals.norms import norm_weight, rms_gain
from attnres.residual.schedule import Source
from attnres.residual.site import Site
from attnres.residual.state import Streams
from attnres.residual.strategy import Strategy


@final
class SiameseSite(Site):
    """The norms of the two streams in a read, with weights of one at the start."""

    post_norm_weight: nn.Parameter | None

    def __init__(self, dim: int, scale: float, *, first: bool, eps: float, device: Any, dtype: Any):
        super().__init__()
        self.eps, self.scale = eps, scale
        self.post_norm_weight = None if first else norm_weight(dim, device=device, dtype=dtype)
        self.pre_norm_weight = norm_weight(dim, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set the weights to ones."""
        for weight in self.parameters():
            nn.init.ones_(weight)

    def gains(self, streams: Tensor) -> Tensor:
        """Norms of the two streams as factors: ``[*batch, 2, dim]``, in float32 (float64 for float64 streams)."""
        post, pre = streams.unbind(-2)
        pre_gain = rms_gain(pre, self.pre_norm_weight, self.eps)
        if self.post_norm_weight is None:
            return torch.stack([torch.ones_like(pre_gain), pre_gain], dim=-2)
        return torch.stack([rms_gain(post, self.post_norm_weight, self.eps), pre_gain], dim=-2)


@final
@dataclass(frozen=True, kw_only=True)
class SiameseNorm(Strategy):
    """``v = f(X + Norm(Y))``, then ``X <- Norm(X + v)`` and ``Y <- Y + v``: post-norm and pre-norm, side by side.

    Both streams start as the embedding, and the output read is ``X + Norm(Y)`` too. The sublayer's own norm is the
    extra norm that the authors put on what it reads, and the model's final norm the one behind the output read. With
    depth scaling X gets ``v / sqrt(2 j)`` in the j-th decoder layer, as in the authors' code; Y gets all of it. What
    is carried for X is the sum before its norm, which is applied at the next read and write. Easy to get wrong: the
    norm of Y is in the read only. Here X is plain post-norm; the authors' language models use HybridNorm's. RMSNorm
    stands for LayerNorm.

    Parameters: 2 D a read, D the first. State: 2 tensors. Moves: 8 tensors a sublayer.
    """

    short_name: ClassVar[str] = "siamese"
    formula: ClassVar[str] = "h = X + Norm(Y);  X <- Norm(X + v/c);  Y <- Y + v"
    citation: ClassVar[str] = "SiameseNorm, arXiv 2602.08064"

    depth_scaling: bool = True
    """Whether outputs enter the post-norm stream divided by the square root of twice the layer's number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.depth_scaling, bool):
            raise ConfigError(f"depth_scaling is {self.depth_scaling!r}; allowed are True and False")

    @property
    def label(self) -> str:
        """Name and scaling, for tables and legends."""
        return "SiameseNorm" if self.depth_scaling else "SiameseNorm (no depth scaling)"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with a norm for each stream; at the first the post-norm stream is the embedding as it is."""
        del num_sublayers
        scale = (2 * (index // 2 + 1)) ** -0.5 if self.depth_scaling else 1.0
        return SiameseSite(dim, scale, first=index == 0, eps=eps, device=device, dtype=dtype)

    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """Both streams are weighted sums of everything so far."""
        del num_sublayers
        return (Source(embedding=True, first=0, stop=site),) * 2

    def start(self, embedding: Tensor) -> Streams:
        """The embedding in both streams, the post-norm stream first."""
        return Streams(torch.stack([embedding, embedding], dim=-2))

    def read(self, state: Streams, site: Site) -> Tensor:
        """The sum of the two streams, each normalised."""
        assert isinstance(site, SiameseSite)
        streams = state.hidden
        gains = site.gains(streams)
        return (gains * streams.to(gains.dtype)).sum(-2).to(streams.dtype)

    def write(self, state: Streams, site: Site, output: Tensor) -> Streams:
        """Add the output to the normalised post-norm stream and to the other as it is."""
        assert isinstance(site, SiameseSite)
        streams, dtype = state.hidden, torch.promote_types(state.hidden.dtype, torch.float32)
        post, pre = streams.to(dtype).unbind(-2)
        added = output.to(dtype)
        normed = site.gains(streams)[..., 0, :] * post
        return Streams(torch.stack([normed + site.scale * added, pre + added], dim=-2).to(streams.dtype))

    def read_weights(self, state: Streams, site: Site) -> Tensor:
        """The two norms as factors."""
        assert isinstance(site, SiameseSite)
        return site.gains(state.hidden)[..., None, :, :]

    def write_weights(self, state: Streams, site: Site, output: Tensor) -> Tensor:
        """The post-norm stream normalised plus the scaled output, and the other plus the output."""
        del output
        assert isinstance(site, SiameseSite)
        post = site.gains(state.hidden)[..., 0, :]
        zero, one = torch.zeros_like(post), torch.ones_like(post)
        rows = [torch.stack([post, zero, site.scale * one], dim=-2), torch.stack([zero, one, one], dim=-2)]
        return torch.stack(rows, dim=-3)
