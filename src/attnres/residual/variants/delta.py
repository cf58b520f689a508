"""Delta Attention Residuals: the running residual, and depth attention over what was added to it."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final, get_args

import torch
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.ops.precision import result_dtype
from attnres.ops.stacked import mix, scores, stack
from attnres.residual.history import AttnResVariant
from attnres.residual.schedule import Source
from attnres.residual.site import DepthSite, Site
from attnres.residual.state import History
from attnres.residual.strategy import stream_dtype
from attnres.residual.weights import keep, rows

NullScore = Literal["zero", "learned"]


@final
class NullSite(DepthSite):
    """A site with a score of its own for reading nothing, zero at start."""

    def __init__(self, dim: int, *, eps: float, closes_block: bool, device: Any, dtype: Any):
        super().__init__(dim, eps=eps, closes_block=closes_block, device=device, dtype=dtype)
        self.null_score = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """As AttnRes; a null score of zero."""
        super().reset_parameters()
        nn.init.zeros_(self.null_score)


@final
@dataclass(frozen=True, kw_only=True)
class DeltaAttnRes(AttnResVariant):
    """``h = x + sum_i alpha_i d_i``: x the running residual sum, d_i the embedding and what blocks have added since.

    With one sublayer a block each output is a delta (their Delta), else a block's sum is, once it is finished (their
    Delta Block). The softmax also runs over a null source with the value zero, so a read may add nothing. Their code
    has it as a learned vector that starts at zero and is both key and value; here its value stays zero and its score
    is zero or learned. Their code offers the embedding from the second read on; here the first read has it too, which
    changes the length of that read and not its direction. It starts as the residual sum plus a mean: without blocks
    that is PreNorm's function up to the norms' eps, since the deltas sum to x; with blocks the running one is missing.

    ``read_scale`` is without effect: the running sum is part of every read.

    Parameters: 2 D a site, and 1 with a learned null score. State: n finished deltas, the block's sum, x. Moves: as
    AttnRes in one phase, and 4 tensors more a sublayer.
    """

    tensors_at_start: ClassVar[int] = 2
    short_name: ClassVar[str] = "delta"
    formula: ClassVar[str] = "h = x + sum_i softmax_i(<w, norm(d_i) g>, null) d_i;  x <- x + v"
    citation: ClassVar[str] = "Delta Attention Residuals, arXiv 2605.18855"

    null_score: NullScore = "zero"
    """Score of the null source: ``"zero"``, or ``"learned"`` for each site, from zero on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.null_score not in get_args(NullScore):
            raise ConfigError(f'null_score is {self.null_score!r}; allowed are "zero" and "learned"')

    @property
    def label(self) -> str:
        """Name and form, for tables and legends."""
        return f"Delta AttnRes ({self.form})" + (", learned null" if self.null_score == "learned" else "")

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with a zero pseudo-query, a key weight of ones, and a null score of zero where that is learned."""
        kind = NullSite if self.null_score == "learned" else DepthSite
        closes_block = self.closes_block(index, num_sublayers)
        return kind(dim, eps=eps, closes_block=closes_block, device=device, dtype=dtype)

    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """The embedding, the finished deltas, and the running sum of everything."""
        ends = self.block_ends(num_sublayers)
        finished = [each for each in super().sources(site, num_sublayers) if each.embedding or each.stop in ends]
        return (*finished, Source(embedding=True, first=0, stop=site))

    def start(self, embedding: Tensor) -> History:
        """The embedding is the first source and the running sum."""
        return History((embedding,), extra=(embedding,))

    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """Softmax over the deltas and the null source, of which the null source's share is left out."""
        del state
        assert isinstance(site, DepthSite)
        raw = scores(stacked, site.folded(stacked.dtype), site.eps)
        null = site.null_score.to(raw.dtype) if isinstance(site, NullSite) else raw.new_zeros(1)
        return torch.cat([raw, null.expand(*raw.shape[:-1], 1)], -1).softmax(-1)[..., None, :-1, None]

    def read(self, state: History, site: Site) -> Tensor:
        """The running sum and the weighted deltas, rounded once."""
        hidden, stacked = state.extra[0], stack(state.finished)
        added = mix(stacked, self.weights(stacked, state, site))
        dtype = result_dtype((*state.finished, hidden), stream_dtype(hidden))
        return (hidden.to(added.dtype) + added).to(dtype)

    def write(self, state: History, site: Site, output: Tensor) -> History:
        """Add the output to the block's delta and to the running sum."""
        partial = output if state.partial is None else state.partial + output
        extra = (state.extra[0] + output,)
        if not site.closes_block:
            return History(state.finished, partial, extra=extra)
        return History((*state.finished, partial), extra=extra)

    def read_weights(self, state: History, site: Site) -> Tensor:
        """Weights of the finished deltas, none of the running one, and all of the running sum."""
        weights = self.weights(stack(state.finished), state, site)
        batch = weights.shape[:-2]
        running = [] if state.partial is None else [weights.new_zeros(*batch, 1, 1)]
        return torch.cat([weights, *running, weights.new_ones(*batch, 1, 1)], -2)

    def write_weights(self, state: History, site: Site, output: Tensor) -> Tensor:
        """Finished deltas stay; the output goes to the running delta and to the running sum."""
        del site
        done, open_ = len(state.finished), state.partial is not None
        columns = done + open_ + 2
        delta = {done: 1.0, columns - 1: 1.0} if open_ else {columns - 1: 1.0}
        return rows(columns, [*keep(done), delta, {columns - 2: 1.0, columns - 1: 1.0}], output)
