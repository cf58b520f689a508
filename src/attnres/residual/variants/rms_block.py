"""Block AttnRes whose finished blocks are sums of normalised outputs."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from attnres.ops.stacked import inverse_rms
from attnres.residual.site import DepthSite, Site
from attnres.residual.state import History
from attnres.residual.variants.fused import FusedVariant
from attnres.residual.weights import keep, rows


@final
@dataclass(frozen=True, kw_only=True)
class RMSBlock(FusedVariant):
    """``b = sum_i y_i / rms(y_i)`` for a finished block; the embedding and the running block's sum stay raw.

    A loud output can so no longer drown the others of its block. Each output is normalised by itself, before the sum
    and without a weight; the sum is not normalised again. An output changes its form when its block is finished: until
    then it is read as it is. With zero queries the model is therefore not PreNorm once a block is finished. The
    published code has an eps of 1e-6 there; here it is that of the key norm.

    Parameters: 2 D a site. State: as Block AttnRes, and in a block a second sum. Moves: as Block AttnRes, and 2
    tensors a sublayer for that sum.
    """

    short_name: ClassVar[str] = "rms-block"
    formula: ClassVar[str] = "h = sum_n softmax_n(<w, norm(b_n) g>) b_n;  b_n = sum_i y_i / rms(y_i) once finished"
    citation: ClassVar[str] = "RMS-block, github.com/kimmichtank/rms-block-attnres, 2026"

    sublayers_per_block: int = 4
    """Sublayers (not decoder layers) summed into one source."""

    @property
    def label(self) -> str:
        """Name and form, for tables and legends."""
        return f"{self.form} AttnRes, RMS values"

    def write(self, state: History, site: Site, output: Tensor) -> History:
        """Add the output to the raw sum and, normalised, to the other; a finished block is the other."""
        assert isinstance(site, DepthSite)
        partial = output if state.partial is None else state.partial + output
        wide = torch.promote_types(output.dtype, torch.float32)
        normed = (output.to(wide) * self._inverse(site, output)[..., None]).to(output.dtype)
        normed = state.extra[0] + normed if state.extra else normed
        ahead = None if state.ahead is None else state.ahead.after(site.index)
        if not site.closes_block:
            return History(state.finished, partial, ahead, extra=(normed,))
        return self._ahead(History((*state.finished, normed), None, ahead), site)

    def read_weights(self, state: History, site: Site) -> Tensor:
        """The softmax values, and none of the second sum."""
        weights = super().read_weights(state, site)
        nothing = weights.new_zeros(*weights.shape[:-2], len(state.extra), 1)
        return torch.cat([weights, nothing], -2)

    def write_weights(self, state: History, site: Site, output: Tensor) -> Tensor:
        """The output as it is in the raw sum, over its RMS in the other."""
        assert isinstance(site, DepthSite)
        done, sums = len(state.finished), len(state.extra)
        columns = done + 2 * sums + 1
        raw = {done: 1.0, columns - 1: 1.0} if sums else {columns - 1: 1.0}
        old = {done + 1: 1.0} if sums else {}
        parts = [*keep(done), *([] if site.closes_block else [raw]), old]
        weights = rows(columns, parts, output)
        inverse = self._inverse(site, output)[..., None, None, None]
        column, row = torch.arange(columns, device=output.device), torch.arange(len(parts), device=output.device)
        place = (row[:, None] == len(parts) - 1) & (column == columns - 1)
        return weights + place[..., None] * inverse

    def _inverse(self, site: DepthSite, output: Tensor) -> Tensor:
        wide = torch.promote_types(output.dtype, torch.float32)
        return inverse_rms(output.to(wide), site.eps)
