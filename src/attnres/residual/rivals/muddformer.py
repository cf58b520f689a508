"""MUDDFormer: query, key, value and residual of a layer are each their own mix of all earlier layers' outputs."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from attnres.errors import ConfigError
from attnres.ops.precision import without_autocast
from attnres.ops.stacked import mix, stack
from attnres.residual.rivals.mudd_site import DenseSite, LayerOutputs
from attnres.residual.schedule import Source
from attnres.residual.site import Site
from attnres.residual.strategy import Strategy

STREAMS = 4
"""Query, key, value and residual, in this order."""


@final
@dataclass(frozen=True, kw_only=True)
class MUDDFormer(Strategy):
    """``x^s = sum_j A^s_j(y_i) y_j`` for s of query, key, value and residual; ``A = GELU(norm(y_i) W1) W2 + a``.

    ``y_0`` is the embedding and ``y_j`` the output of decoder layer j with its residual stream, a cumulative state. The
    attention of the next layer reads three mixes and its output is added to the fourth, x^r; the MLP reads that sum.
    The first layer reads the embedding; the output read is one mix, whose MLP is four times as wide. The norm in A has
    no weight. As published W1 is normal of variance 1/D, W2 zero and a one-hot: the model starts as PreNorm.

    The layer's own attention norm serves the three reads, where the authors' larger models have one each (a norm's
    weight is absorbed by the projection behind it). Their norms around the mix (PrePostDANorm) and the MLP width that
    grows with depth are not part of this. A write of attention computes the weights of its site once more.

    Parameters: with n = layers so far + 1, 4n D + 16n^2 + 4n a layer. State: n tensors, and one more inside a layer.
    Moves: 2n + 3 tensors an attention sublayer, 3 an MLP.
    """

    short_name: ClassVar[str] = "muddformer"
    formula: ClassVar[str] = "h_s = sum_j A_s,j y_j for s = q, k, v;  x <- sum_j A_r,j y_j + v;  A of the newest y"
    citation: ClassVar[str] = "MUDDFormer, arXiv 2502.12170"

    last_expansion: int = 4
    """Width of the MLP of the output read in multiples of its weights; the others have as many as weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        factor = self.last_expansion
        if factor < 1:
            raise ConfigError(f"last_expansion is {factor!r}; allowed is a whole number of 1 or more")

    @property
    def label(self) -> str:
        """Name for tables and legends."""
        return "MUDDFormer"

    def views(self, index: int, num_sublayers: int) -> int:
        """Three at attention, but for the first layer, which has only the embedding to read."""
        return 3 if 0 < index < num_sublayers and index % 2 == 0 else 1

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with weights at attention and output; the first site and those of MLPs have none.

        Raises:
            ConfigError: The last layer has no MLP.
        """
        if num_sublayers % 2:
            raise ConfigError(f"num_sublayers is {num_sublayers}; allowed is an even number, attention and MLP in turn")
        if index == 0 or index % 2:
            return Site()
        outputs = index // 2 + 1
        streams = STREAMS if index < num_sublayers else 1
        hidden = outputs * (streams if index < num_sublayers else self.last_expansion)
        return DenseSite(dim, outputs, streams, hidden, index, eps=eps, device=device, dtype=dtype)

    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """Layer outputs, each a weighted sum of everything so far; inside a layer the running sum."""
        del num_sublayers
        stops = range(0, site + 1, 2) if site % 2 == 0 else (site,)
        return tuple(Source(embedding=True, first=0, stop=stop) for stop in stops)

    def start(self, embedding: Tensor) -> LayerOutputs:
        """The embedding is the first layer output."""
        return LayerOutputs((embedding,))

    def read(self, state: LayerOutputs, site: Site) -> Tensor:
        """Three mixes for query, key and value, one for the output; inside a layer the running sum."""
        if state.hidden is not None:
            return state.hidden
        if not isinstance(site, DenseSite):
            return state.finished[-1]
        weights = self._weights(state, site)[..., : site.views, :, None]
        return mix(stack(state.finished), weights).to(state.finished[-1].dtype)

    def write(self, state: LayerOutputs, site: Site, output: Tensor) -> LayerOutputs:
        """Attention is added to the residual mix; the MLP completes a layer output."""
        if state.hidden is not None:
            return LayerOutputs((*state.finished, state.hidden + output))
        if not isinstance(site, DenseSite):
            return LayerOutputs(state.finished, state.finished[-1] + output)
        newest = state.finished[-1]
        mixed = mix(stack(state.finished), self._weights(state, site)[..., -1:, :, None])
        return LayerOutputs(state.finished, (mixed + output.to(mixed.dtype)).to(newest.dtype))

    def read_weights(self, state: LayerOutputs, site: Site) -> Tensor:
        """The mixes' weights, or all on the running sum."""
        if isinstance(site, DenseSite):
            return self._weights(state, site)[..., : site.views, :, None]
        old = len(state.finished) + (state.hidden is not None)
        return self._rows(old, state)[-1:, :old, None]

    def write_weights(self, state: LayerOutputs, site: Site, output: Tensor) -> Tensor:
        """Layer outputs stay; the running sum is the residual mix and attention, or becomes a layer output."""
        del output
        if state.hidden is not None:  # its row becomes that of a layer output
            rows = self._rows(len(state.finished) + 1, state)
            rows[-1, -1] = 1
            return rows[..., None]
        rows = self._rows(len(state.finished), state)
        if not isinstance(site, DenseSite):
            added = rows[-1:].clone()
        else:
            residual = self._weights(state, site)[..., -1:, :]
            added = F.pad(residual, (0, 1))
            rows = rows.expand(*residual.shape[:-2], *rows.shape)
        added[..., -1] = 1
        return torch.cat([rows, added], dim=-2)[..., None]

    def _weights(self, state: LayerOutputs, site: DenseSite) -> Tensor:
        """``A``: ``[*batch, streams, layer outputs]``, in float32."""
        newest = state.finished[-1]
        wide = newest.to(torch.promote_types(newest.dtype, torch.float32))
        normed = F.rms_norm(wide, wide.shape[-1:], eps=site.eps)
        with without_autocast(wide):
            hidden = F.gelu(normed @ site.in_weight.to(wide.dtype).mT)
            varied = hidden @ site.out_weight.to(wide.dtype).mT
        return varied.unflatten(-1, (site.streams, -1)) + site.static_weight.to(wide.dtype)

    def _rows(self, old: int, state: LayerOutputs) -> Tensor:
        newest = state.finished[-1]
        wide = torch.promote_types(newest.dtype, torch.float32)
        return torch.eye(old, old + 1, device=newest.device, dtype=wide)
