"""The depth attention of Inkling-2: normalised values, scaled scores, and a read each for query, key and value."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final, get_args

import torch
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.ops.precision import without_autocast
from attnres.ops.stacked import inverse_rms
from attnres.residual.history import AttnResVariant
from attnres.residual.site import Site
from attnres.residual.state import History

Reads = Literal["qkv", "one"]


@final
class QueriesSite(Site):
    """A site with one pseudo-query for each of its reads, ``[reads, dim]``, zero at start, and no key weight."""

    def __init__(self, reads: int, dim: int, *, eps: float, closes_block: bool, device: Any, dtype: Any):
        super().__init__(closes_block=closes_block)
        self.eps = eps
        self.pseudo_query = nn.Parameter(torch.zeros(reads, dim, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the pseudo-queries to zeros."""
        nn.init.zeros_(self.pseudo_query)


@final
@dataclass(frozen=True, kw_only=True)
class Inkling2(AttnResVariant):
    """``h_r = sum_n softmax_n(<w_r, norm(b_n)> / sqrt(D)) norm(b_n)`` for r one of query, key and value.

    Keys *and* values are normalised, without a weight, so loud sources are not heard more, and the embedding weighs as
    much as a block. The model does not start as PreNorm. The first sublayer reads the embedding as it is and learns
    nothing. Inkling-2 takes three reads in its full-attention layers and one in its sliding ones, and gives each of
    the three a norm of its own; here every attention takes three, and the sublayer's one norm serves them all.

    Parameters: 3 D at an attention, D elsewhere. State: as Block AttnRes. Moves: as Block AttnRes in one phase, and 2
    tensors more at an attention.
    """

    short_name: ClassVar[str] = "inkling2"
    formula: ClassVar[str] = "h = sum_n softmax_n(<w, norm(b_n)> / sqrt(D)) norm(b_n)  for query, key and value apart"
    citation: ClassVar[str] = "Inkling-2, in Transformers 5.24"

    sublayers_per_block: int = 12
    """Sublayers (not decoder layers) summed into one source; Inkling-2 has blocks of 6 layers."""
    reads: Reads = "qkv"
    """``"qkv"``: query, key and value of an attention have a read each. ``"one"``: they share one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reads not in get_args(Reads):
            raise ConfigError(f'reads is {self.reads!r}; allowed are "qkv" and "one"')

    @property
    def label(self) -> str:
        """Name and form, for tables and legends."""
        return f"Inkling-2 ({self.form})" + ("" if self.reads == "qkv" else ", one read")

    def views(self, index: int, num_sublayers: int) -> int:
        """Three at every attention but the first."""
        return 3 if self.reads == "qkv" and index % 2 == 0 and 0 < index < num_sublayers else 1

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with zero pseudo-queries; the first has none."""
        closes_block = self.closes_block(index, num_sublayers)
        if index == 0:
            return Site(closes_block=closes_block)
        reads = self.views(index, num_sublayers)
        return QueriesSite(reads, dim, eps=eps, closes_block=closes_block, device=device, dtype=dtype)

    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """The softmax values, each over the RMS of its source."""
        del state
        if not isinstance(site, QueriesSite):
            return stacked.new_ones(1, 1, 1)
        inverse = inverse_rms(stacked, site.eps)[..., None, :]
        with without_autocast(stacked):
            raw = site.pseudo_query.to(stacked.dtype) @ stacked.mT * inverse
        return ((raw * stacked.shape[-1] ** -0.5).softmax(-1) * inverse)[..., None]
