"""What some write-ups describe as attention residuals: attention over positions in place of the residual addition."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.ops.precision import without_autocast
from attnres.residual.drawing import draw_normal
from attnres.residual.site import Site
from attnres.residual.state import RunningSum
from attnres.residual.streams import SingleStream


@final
class ProjectionSite(Site):
    """Query, key and value projections, one square matrix a channel group; the value's starts as the identity."""

    def __init__(self, dim: int, groups: int, place: int, *, device: Any, dtype: Any):
        super().__init__()
        self.place = place
        shape = (groups, dim // groups, dim // groups)
        self.query_weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.key_weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.value_weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if not self.value_weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random queries and keys, and values that are the output itself."""
        for number, weight in enumerate((self.query_weight, self.key_weight)):
            draw_normal(weight, std=weight.shape[-1] ** -0.5, place=2 * self.place + number)
        with torch.no_grad():
            self.value_weight.copy_(torch.eye(self.value_weight.shape[-1], device="cpu"))


@final
@dataclass(frozen=True, kw_only=True)
class ProjectedResidual(SingleStream):
    """``x <- x + attention(x Wq, v Wk, v Wv)``, causal over positions, in place of ``x <- x + v``.

    This is not Attention Residuals: it attends over positions and not over depth, and costs a projected attention a
    sublayer. It stands here because write-ups describe it under that name. The query is made of the residual stream,
    key and value of the sublayer's output; with ``channel_groups`` each group of channels projects and attends on its
    own. Scores are divided by the root of a group's width. Initial values are our choice: queries and keys random, a
    value the output itself, so what is written starts as a weighted mean of the outputs up to a position. It cannot
    start as PreNorm.

    It is the only strategy that crosses tokens. For training, and for scoring or generating with ``use_cache=False``:
    step by step with a KV cache the outputs of earlier positions are gone, and a model refuses. Positions are those of
    the tensor: it knows nothing of padding on the left or of several documents in one sequence.

    Parameters: 3 D^2 / groups a site. State: one tensor. Moves: 3 tensors a sublayer, and those of the attention. In
    the mixing matrix the sources are what is written, `source_of`, since that is no weighted sum of one token's.
    """

    crosses_tokens: ClassVar[bool] = True
    short_name: ClassVar[str] = "projected"
    formula: ClassVar[str] = "h = x;  x <- x + softmax(x Wq (v Wk)^T / sqrt(d)) v Wv over earlier positions"
    citation: ClassVar[str] = "described in blogs as attention residuals; not arXiv 2603.15031"

    channel_groups: int = 1
    """Groups of channels that project and attend on their own; a divisor of the width."""

    def __post_init__(self) -> None:
        super().__post_init__()
        count = self.channel_groups
        if count < 1:
            raise ConfigError(f"channel_groups is {count!r}; allowed is a whole number of 1 or more")

    @property
    def label(self) -> str:
        """Name and groups, for tables and legends."""
        return "projected residual" + (f" ({self.channel_groups} groups)" if self.channel_groups > 1 else "")

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with three projections; the output site has none.

        Raises:
            ConfigError: The groups do not divide the width.
        """
        del eps
        if dim % self.channel_groups:
            raise ConfigError(f"channel_groups is {self.channel_groups}; allowed is a divisor of the width, {dim}")
        if index == num_sublayers:
            return Site()
        return ProjectionSite(dim, self.channel_groups, index, device=device, dtype=dtype)

    def source_of(self, state: RunningSum, site: Site, output: Tensor) -> Tensor:
        """What the stream attends to in the outputs ``[*batch, positions, dim]`` up to each position."""
        assert isinstance(site, ProjectionSite)
        wide = torch.promote_types(output.dtype, torch.float32)
        grouped = [value.to(wide).unflatten(-1, (self.channel_groups, -1)) for value in (state.hidden, output)]
        stream, written = (value.transpose(-2, -3) for value in grouped)  # [*batch, groups, positions, width]
        with without_autocast(output):
            query = stream @ site.query_weight.to(wide)
            key = written @ site.key_weight.to(wide)
            value = written @ site.value_weight.to(wide)
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(-2, -3).flatten(-2).to(output.dtype)

    def write(self, state: RunningSum, site: Site, output: Tensor) -> RunningSum:
        """Add what is attended to."""
        return RunningSum(state.hidden + self.source_of(state, site, output))
