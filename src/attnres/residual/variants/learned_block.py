"""Block AttnRes that learns where its blocks end."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.ops.stacked import scores
from attnres.residual.history import HistoryStrategy
from attnres.residual.residual import Residual
from attnres.residual.schedule import EMBEDDING, Source
from attnres.residual.site import DepthSite, Site
from attnres.residual.state import History
from attnres.residual.streams import scaled
from attnres.residual.weights import keep, rows


@final
class GateSite(DepthSite):
    """A site with a gate that closes the block after the sublayer that reads here."""

    def __init__(self, dim: int, *, start: float, eps: float, device: Any, dtype: Any):
        super().__init__(dim, eps=eps, device=device, dtype=dtype)
        self.start = math.log(start) - math.log1p(-start)
        self.gate_bias = nn.Parameter(torch.full((1,), self.start, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """As AttnRes; the gate as it starts."""
        super().reset_parameters()
        nn.init.constant_(self.gate_bias, self.start)


@final
@dataclass(frozen=True, kw_only=True)
class LearnedBlock(HistoryStrategy):
    """``p_{l+1} = (1 - c_l) p_l + v_{l+1}`` with learned gates ``c_l = sigmoid(b_l)``: 1 closes a block, 0 does not.

    Every partial sum is offered as a source, with ``log c_l`` added to its score: what is closed is heard, what goes on
    is in the next. The newest is heard in full whatever its gate, as a running block is. With all c at 0 or 1 this is
    `CutBlock` at the gates that are 1, and `boundaries` gives the cuts nearest to trained ones. The embedding plus all
    partial sums times their gates is the residual sum for *any* gates, so with zero queries the model starts as PreNorm
    does; where gates start is free, and 1/2 is as far from both ends as can be.

    Parameters: 2 D + 1 a site. State: as Full AttnRes, and one number a sublayer. Moves: as Full AttnRes in one phase,
    and 2 tensors more a sublayer.
    """

    weights_meet_once: ClassVar[bool] = False  # a gate is in every later read
    short_name: ClassVar[str] = "learned-block"
    formula: ClassVar[str] = "h = sum_l softmax_l(<w, norm(p_l) g> + log c_l) p_l;  p <- (1 - c) p + v"
    citation: ClassVar[str] = "this project; cf. Attention Residuals, arXiv 2603.15031, Eq. 5-6"

    start_gate: float = 0.5
    """Where the gates c start, between 0 (one block) and 1 (Full AttnRes), both left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.start_gate < 1:
            raise ConfigError(f"start_gate is {self.start_gate!r}; allowed is a number between 0 and 1")

    @property
    def label(self) -> str:
        """Name for tables and legends."""
        return "Block AttnRes, learned blocks"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with a gate, but for the last sublayer, whose block ends anyway, and the output read."""
        if index >= num_sublayers - 1:
            return DepthSite(dim, eps=eps, device=device, dtype=dtype)
        return GateSite(dim, start=self.start_gate, eps=eps, device=device, dtype=dtype)

    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """The embedding and every partial sum, in which older outputs fade."""
        del num_sublayers
        return (EMBEDDING, *(Source(embedding=False, first=0, stop=stop) for stop in range(1, site + 1)))

    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """Softmax of scores and log gates; with ``read_scale="sum"`` times the sum of the gates."""
        assert isinstance(site, DepthSite)
        count = stacked.shape[-2]
        gates = [gate.to(stacked.dtype) for gate in state.extra[: max(0, count - 2)]]
        full = stacked.new_zeros(1)
        bias = torch.cat([full, *(F.logsigmoid(gate) for gate in gates), *([full] if count > 1 else [])])
        raw = scores(stacked, site.folded(stacked.dtype), site.eps)
        weights = (raw + bias).softmax(-1)[..., None, :, None]
        return weights * bias.exp().sum() if self.read_scale == "sum" else weights

    def write(self, state: History, site: Site, output: Tensor) -> History:
        """A new partial sum: what the last gate leaves of the one before, and the output."""
        partial = output
        if state.extra:
            partial = scaled(state.finished[-1], torch.sigmoid(-_wide(state.extra[-1]))) + output
        # a copy: an activation checkpoint would take a parameter that it returns for its own result
        gates = (*state.extra, site.gate_bias.clone()) if isinstance(site, GateSite) else state.extra
        return History((*state.finished, partial), extra=gates)

    def write_weights(self, state: History, site: Site, output: Tensor) -> Tensor:
        """Every partial sum stays; the new one has the output and what the last gate leaves."""
        del site
        count = len(state.finished)
        weights = rows(count + 1, [*keep(count), {count: 1.0}], output)
        if state.extra:
            weights[count, count - 1] = torch.sigmoid(-_wide(state.extra[-1])).detach().to(weights.dtype)
        return weights

    def _out_scale(self, state: History) -> float:
        """In `weights`, as it depends on the gates."""
        del state
        return 1.0


def boundaries(residual: Residual) -> tuple[int, ...]:
    """The cuts nearest to the gates of a residual path with `LearnedBlock`, for `CutBlock`: where c exceeds 1/2.

    Raises:
        ConfigError: The residual path has no gates.
    """
    if not isinstance(residual.strategy, LearnedBlock):
        raise ConfigError(f"the strategy is {residual.strategy.label}; allowed is {LearnedBlock.__name__}")
    sites = [residual.site(index) for index in range(residual.num_sublayers)]
    return tuple(
        site.index + 1 for site in sites if isinstance(site, GateSite) and bool((site.gate_bias.detach() > 0).all())
    )


def _wide(gate: Tensor) -> Tensor:
    return gate.to(torch.promote_types(gate.dtype, torch.float32))
