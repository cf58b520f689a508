"""WAV: beside its sum, a finished block offers what its sum leaves out."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from attnres.errors import ConfigError
from attnres.ops.stacked import inverse_rms, scores, stack
from attnres.residual.history import AttnResVariant
from attnres.residual.schedule import Source
from attnres.residual.site import Site
from attnres.residual.state import History
from attnres.residual.streams import scaled
from attnres.residual.variants.details import DetailSite, signs
from attnres.residual.weights import keep, rows


@final
@dataclass(frozen=True, kw_only=True)
class WAV(AttnResVariant):
    """Block AttnRes with two more sources for each finished block, both differences within it.

    The phase detail is the block's attention outputs minus its MLP outputs, the split detail the outputs of its first
    half minus those of its second. Where a block has more of one side than of the other, the sides are weighted so
    that the weights sum to zero. A detail is scaled, token by token, to the RMS of the block's sum; no gradient flows
    through that factor. Scores of details have a learned bias for each site and kind that starts at ``bias``, so the
    model starts near Block AttnRes. The size of that bias is this project's choice. A running block has no details.
    (The paper's second version, HAARES, keeps the split detail alone.)

    Parameters: 2 D + 2 a site. State: three tensors a finished block, and in a block three sums. Moves: as Block
    AttnRes with three times the finished sources, and 4 tensors a sublayer.
    """

    short_name: ClassVar[str] = "wav"
    formula: ClassVar[str] = "h = sum_n softmax_n(<w, norm(b_n) g> + bias_n) b_n;  b_n sums and differences of blocks"
    citation: ClassVar[str] = "WAV, arXiv 2606.06564v1"

    sublayers_per_block: int = 4
    """Sublayers (not decoder layers) of a block; 2 or more."""
    bias: float = -4.0
    """Where the score bias of details starts; below zero keeps them out at first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sublayers_per_block < 2:
            raise ConfigError(f"sublayers_per_block is {self.sublayers_per_block}; allowed is 2 or more, to differ in")

    @property
    def label(self) -> str:
        """Name and form, for tables and legends."""
        return f"WAV {self.form}"

    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """As of Block AttnRes, with each finished block of two or more sublayers three times."""
        plain, ends = super().sources(site, num_sublayers), self.block_ends(num_sublayers)
        detailed = [source.stop in ends and source.stop - source.first > 1 for source in plain]
        return tuple(each for each, more in zip(plain, detailed, strict=True) for _ in range(3 if more else 1))

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with a zero pseudo-query, a key weight of ones, and biases below zero."""
        sources = self.sources(index, num_sublayers)
        kinds = tuple(sources[:place].count(source) for place, source in enumerate(sources))
        closes_block = self.closes_block(index, num_sublayers)
        options = {"closes_block": closes_block, "device": device, "dtype": dtype}
        first = index - index % self.sublayers_per_block
        own = signs(index, first, min(self.sublayers_per_block, num_sublayers - first))
        return DetailSite(dim, kinds=kinds, signs=own, start=self.bias, eps=eps, **options)

    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """Softmax of the scores, with the biases of the details."""
        del state
        assert isinstance(site, DetailSite)
        biases = torch.cat([site.detail_bias.new_zeros(1), site.detail_bias]).to(stacked.dtype)
        bias = torch.stack([biases[kind] for kind in site.kinds])
        raw = scores(stacked, site.folded(stacked.dtype), site.eps)
        return (raw + bias).softmax(-1)[..., None, :, None]

    def write(self, state: History, site: Site, output: Tensor) -> History:
        """Add the output to the block's sums; a block that is finished puts three sources in the history, or one."""
        assert isinstance(site, DetailSite)
        partial, details = self._sums(state, site, output)
        if not site.closes_block:
            return History(state.finished, partial, extra=details)
        factors = self._factors(site, partial, details)
        matched = (scaled(detail, factor) for detail, factor in zip(details, factors, strict=True))
        return History((*state.finished, partial, *matched))

    def read_weights(self, state: History, site: Site) -> Tensor:
        """The softmax values, and none of the detail sums."""
        weights = super().read_weights(state, site)
        return torch.cat([weights, weights.new_zeros(*weights.shape[:-2], len(state.extra), 1)], -2)

    def write_weights(self, state: History, site: Site, output: Tensor) -> Tensor:
        """The output in the sum and, signed, in the details, which are scaled when the block is finished."""
        assert isinstance(site, DetailSite)
        done, old = len(state.finished), state.partial is not None
        added = (1.0, *(site.signs or ()))
        last = done + old * len(added)
        entries = [{last: sign, **({done + place: 1.0} if old else {})} for place, sign in enumerate(added)]
        weights = rows(last + 1, [*keep(done), *entries], output)
        if not site.closes_block or site.signs is None:
            return weights
        factors = self._factors(site, *self._sums(state, site, output))
        ones = torch.ones_like(factors[0])
        return weights * torch.stack([*[ones] * (done + 1), *factors], -2)[..., None, :]

    def _sums(self, state: History, site: DetailSite, output: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The sum of the running block and its details, with the output."""
        partial = output if state.partial is None else state.partial + output
        added = tuple(sign * output for sign in site.signs or ())
        return partial, tuple(map(torch.add, state.extra, added)) if state.extra else added

    def _factors(self, site: DetailSite, total: Tensor, details: tuple[Tensor, ...]) -> list[Tensor]:
        """RMS of the block's sum over that of each detail, ``[*batch, 1]``."""
        inverse = inverse_rms(stack([total.detach(), *(detail.detach() for detail in details)]), site.eps)
        return [inverse[..., place, None] / inverse[..., :1] for place in range(1, len(details) + 1)]

    def _out_scale(self, state: History) -> float:
        """The number of sources without details: at biases far below zero a zero query then reads the residual sum."""
        if self.read_scale != "sum":
            return 1.0
        return float(1 + math.ceil((len(state.finished) - 1) / 3) + (state.partial is not None))
