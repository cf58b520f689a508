"""AttnRes whose scores look at a slice of the channels only."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.ops.stacked import scores
from attnres.residual.history import AttnResVariant
from attnres.residual.site import Site
from attnres.residual.state import History
from attnres.residual.variants.low_rank_query import check_rank


@final
class SliceSite(Site):
    """A site with a pseudo-query for a slice of the channels, zero at start, and no key weight."""

    def __init__(self, rank: int, counts: tuple[int, ...], *, eps: float, closes_block: bool, device: Any, dtype: Any):
        super().__init__(closes_block=closes_block)
        self.eps, self.counts = eps, counts
        self.pseudo_query = nn.Parameter(torch.zeros(rank, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the pseudo-query to zeros."""
        nn.init.zeros_(self.pseudo_query)


@final
@dataclass(frozen=True, kw_only=True)
class SlicedKey(AttnResVariant):
    """``s_i = <w, norm(v_i[-R:])>``: keys are the last R channels, normalised by themselves; values are whole.

    The published code has no key weight and averages the outputs of a block. Here a block is their sum, as in AttnRes,
    unless ``block_average`` says otherwise; with averages and zero queries blocks weigh less the longer they are, and
    the model does not start as PreNorm. (The key of a source is the same for its sum and its average.)

    Parameters: R a site. State and moves: as AttnRes in one phase; a kernel may keep the R channels at hand.
    """

    short_name: ClassVar[str] = "sliced-key"
    formula: ClassVar[str] = "h = sum_i softmax_i(<w, norm(v_i[-R:])>) v_i"
    citation: ClassVar[str] = "LR-AttnRes, arXiv 2607.09694"

    rank: int | None = None
    """Channels R that a score looks at, the last ones; by default a quarter of the width."""
    block_average: bool = False
    """Whether a block, finished or running, is read as the average of its outputs instead of their sum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None:
            check_rank(self.rank)

    @property
    def label(self) -> str:
        """Name, form and slice, for tables and legends."""
        slice_ = "a quarter" if self.rank is None else self.rank
        return f"{self.form} AttnRes, keys of {slice_} channels" + (", block averages" if self.block_average else "")

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with a zero pseudo-query of R numbers.

        Raises:
            ConfigError: R exceeds the width.
        """
        rank = max(1, dim // 4) if self.rank is None else self.rank
        if rank > dim:
            raise ConfigError(f"rank is {rank}; allowed is up to the width, which is {dim}")
        counts = tuple(max(1, source.stop - source.first) for source in self.sources(index, num_sublayers))
        closes_block = self.closes_block(index, num_sublayers)
        return SliceSite(rank, counts, eps=eps, closes_block=closes_block, device=device, dtype=dtype)

    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """Softmax of the slices' scores, over the number of outputs where blocks are averages."""
        del state
        assert isinstance(site, SliceSite)
        weights = scores(stacked[..., -len(site.pseudo_query) :], site.pseudo_query, site.eps).softmax(-1)
        if self.block_average:
            weights = weights / weights.new_tensor(site.counts)
        return weights[..., None, :, None]
