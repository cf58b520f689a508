"""The residual of nanochat: before each decoder layer the stream is scaled and some of the embedding is added."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attnres.errors import ConfigError
from attnres.residual.schedule import EMBEDDING, Source
from attnres.residual.site import Site
from attnres.residual.strategy import Strategy


@final
@dataclass(frozen=True)
class Blend:
    """The embedding, the stream, and the stream at half depth once it is there, each ``[*batch, dim]``."""

    embedding: Tensor
    hidden: Tensor
    middle: Tensor | None = None


pytree.register_dataclass(Blend, field_names=["embedding", "hidden", "middle"])


@final
class ScaleSite(Site):
    """Scalars of stream and embedding where a layer begins (its first read, or the write before), or of half depth."""

    stream_scale: nn.Parameter | None
    embedding_scale: nn.Parameter | None
    middle_scale: nn.Parameter | None

    def __init__(self, start: dict[str, float], *, keeps_middle: bool, device: Any, dtype: Any):
        super().__init__()
        self.start, self.keeps_middle = start, keeps_middle
        for name in ("stream_scale", "embedding_scale", "middle_scale"):
            value = start.get(name)
            scale = None if value is None else nn.Parameter(torch.full((1,), value, device=device, dtype=dtype))
            self.register_parameter(name, scale)

    def reset_parameters(self) -> None:
        """Set the scalars to where they start."""
        for name, value in self.start.items():
            nn.init.constant_(getattr(self, name), value)

    def blend(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """The stream, scaled, and some of the embedding; just the stream where no layer begins."""
        if self.stream_scale is None or self.embedding_scale is None:
            return hidden
        wide = torch.promote_types(hidden.dtype, torch.float32)
        blended = self.stream_scale.to(wide) * hidden + self.embedding_scale.to(wide) * embedding
        return blended.to(hidden.dtype)


@final
@dataclass(frozen=True, kw_only=True)
class NanochatResidual(Strategy):
    """``x <- r_i x + e_i x_0`` before decoder layer i with ``x_0`` the embedding; ``x <- x + v`` for each sublayer.

    The scalars start at ``r_i = 1.15 - 0.10 i/(n-1)`` and ``e_i = 0.20 - 0.15 i/(n-1)``, i = 0 ... n-1. The output
    read is ``x - 0.2 x_m``, where ``x_m`` is the stream after layer ``n // 2``, counted from 0, and 0.2 is learned.
    Easy to get wrong: once per layer, not per sublayer, and the first too, so that it reads 1.35 times the embedding.
    It does not start as PreNorm's function. nanochat trains ``r`` at a hundredth of the rate of ``e``; its norm on the
    embedding, value embeddings and mix with the previous token are not here.

    Parameters: 2 scalars a layer, and 1. State: 2 tensors, 3 in the second half. Moves: 3.5 tensors a sublayer.
    """

    tensors_at_start: ClassVar[int] = 2
    short_name: ClassVar[str] = "nanochat"
    formula: ClassVar[str] = "h = x;  x <- x + v;  x <- r_i x + e_i x_0 before layer i;  output x - 0.2 x_middle"
    citation: ClassVar[str] = "nanochat, github.com/karpathy/nanochat (2026)"

    back_out: bool = True
    """Whether the output read takes out some of the stream at half depth."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.back_out, bool):
            raise ConfigError(f"back_out is {self.back_out!r}; allowed are True and False")

    @property
    def label(self) -> str:
        """Name for tables and legends."""
        return "nanochat residual" if self.back_out else "nanochat residual (no back-out)"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """Two scalars at the first site and at each MLP that a layer follows, one at the output if it backs out."""
        del dim, eps
        layers = (num_sublayers + 1) // 2
        layer, is_mlp = divmod(index, 2)
        start: dict[str, float] = {}
        if index == num_sublayers:
            start = {"middle_scale": 0.2} if self.back_out else {}
        elif (is_mlp or index == 0) and layer + is_mlp < layers:  # the layer whose stream is blended here
            depth = (layer + is_mlp) / max(layers - 1, 1)
            start = {"stream_scale": 1.15 - 0.10 * depth, "embedding_scale": 0.20 - 0.15 * depth}
        keeps_middle = self.back_out and index == 2 * (layers // 2) + 1 < num_sublayers
        return ScaleSite(start, keeps_middle=keeps_middle, device=device, dtype=dtype)

    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """The embedding, the stream, and the stream at half depth where it is kept."""
        middle = 2 * ((num_sublayers + 1) // 4) + 2
        kept = (Source(embedding=True, first=0, stop=middle),) if self.back_out and site >= middle else ()
        return (EMBEDDING, Source(embedding=True, first=0, stop=site), *kept)

    def start(self, embedding: Tensor) -> Blend:
        """The embedding is the stream too."""
        return Blend(embedding, embedding)

    def read(self, state: Blend, site: Site) -> Tensor:
        """The stream, blended at the first site, and at the output without some of half depth."""
        assert isinstance(site, ScaleSite)
        hidden = state.hidden
        if site.middle_scale is None or state.middle is None:
            return hidden if site.index else site.blend(hidden, state.embedding)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return (hidden - site.middle_scale.to(wide) * state.middle).to(hidden.dtype)

    def write(self, state: Blend, site: Site, output: Tensor) -> Blend:
        """Add the output to what was read, and blend the stream with the embedding for the layer that follows."""
        assert isinstance(site, ScaleSite)
        hidden = self.read(state, site) + output
        middle = hidden if site.keeps_middle else state.middle
        return Blend(state.embedding, site.blend(hidden, state.embedding) if site.index else hidden, middle)

    def read_weights(self, state: Blend, site: Site) -> Tensor:
        """The scalars of the read, and 1 for the stream."""
        assert isinstance(site, ScaleSite)
        wide = torch.promote_types(state.hidden.dtype, torch.float32)
        count = 2 if state.middle is None else 3
        embedding, hidden, *middle = torch.eye(count, device=state.hidden.device, dtype=wide)
        read = hidden if site.index else site.blend(hidden, embedding)
        if middle and site.middle_scale is not None:
            read = read - site.middle_scale.to(wide) * middle[0]
        return read[None, :, None]

    def write_weights(self, state: Blend, site: Site, output: Tensor) -> Tensor:
        """The embedding and half depth stay; the stream is what was read and the output, blended."""
        del output
        assert isinstance(site, ScaleSite)
        read = self.read_weights(state, site)[0, :, 0]
        stay = torch.eye(len(read), len(read) + 1, device=read.device, dtype=read.dtype)
        written = torch.cat([read, read.new_ones(1)])
        hidden = site.blend(written, stay[0]) if site.index else written
        return torch.stack([stay[0], hidden, *stay[2:], *([written] if site.keeps_middle else [])])[..., None]
