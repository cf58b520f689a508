"""MRLA: each sublayer's output queries all outputs so far, and what it finds is added to the stream."""

from dataclasses import dataclass
from math import log2
from typing import Any, ClassVar, Literal, final, get_args

import torch
from torch import Tensor

from attnres.errors import ConfigError
from attnres.ops.precision import without_autocast
from attnres.residual.rivals.mrla_site import LayerAttentionSite, Retrieved, head_scores, spread
from attnres.residual.schedule import Source
from attnres.residual.site import Site
from attnres.residual.strategy import Strategy

Form = Literal["base", "light"]


@final
@dataclass(frozen=True, kw_only=True)
class LayerAttention(Strategy):
    """``x <- x + v_t + o_t`` where ``o_t`` is attention of output ``v_t`` over the outputs so far, a head per group.

    Base: ``o_t = sum_{i<=t} softmax_i(<q_t, k_i> / sqrt(D/H)) w_i * v_i``. Light, which is linear in depth:
    ``o_t = carry_t * o_{t-1} + sigmoid(<q_t, k_t> / sqrt(D/H)) w_t * v_t``. Both as published: query and key are a
    filter of a few taps along the channels, values are taken channel by channel, there is no other projection.

    Published for images, where query and key are pooled over all positions, values are a depthwise 3x3 convolution, and
    it follows a whole layer. Pooling over positions would not be causal, so all of this is per token here, after each
    sublayer, over the sublayers' outputs (AttnRes, Table 5); query and key are made of the normalised output, as in the
    authors' DeiT. The batch norm of ``o`` is left out, and the value weights start at zero, so the model starts as
    PreNorm; carry starts at one (the authors': standard normal).

    Parameters: D + 2k a site for k taps, and D if light. State: base, 1 + a key and a value for each output so
    far; light, 2 tensors. Moves: base, twice Full AttnRes in one phase and 3 more; light, 5 tensors a sublayer.
    """

    short_name: ClassVar[str] = "mrla"
    formula: ClassVar[str] = "x <- x + v + o;  o = sum_i softmax_i(<q, k_i>) w_i v_i;  q, k of v, v_i by a filter"
    citation: ClassVar[str] = "MRLA, arXiv 2302.03985"

    form: Form = "light"
    """``"base"``: a softmax over all outputs so far. ``"light"``: a running sum, carried by a weight per channel."""
    heads: int = 4
    """Channel groups H that attend on their own; a divisor of the width."""
    taps: int | None = None
    """Taps of the filters along the channels, an odd number; None for the rule of ECA, near (log2 D + 1) / 2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form not in get_args(Form):
            raise ConfigError(f'form is {self.form!r}; allowed are "base" and "light"')
        for name, value in (("heads", self.heads), ("taps", self.taps)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value!r}; allowed is a whole number of 1 or more")
        if self.taps is not None and self.taps % 2 == 0:
            raise ConfigError(f"taps is {self.taps}; allowed is an odd number")

    @property
    def label(self) -> str:
        """Name and form, for tables and legends."""
        return f"MRLA-{self.form}"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with filters; the output site has none.

        Raises:
            ConfigError: The heads do not divide the width.
        """
        if dim % self.heads:
            raise ConfigError(f"heads is {self.heads}; allowed is a divisor of the width, which is {dim}")
        if index == num_sublayers:
            return Site()
        carries = self.form == "light" and index > 0
        taps = self.taps or int((log2(dim) + 1) / 2) // 2 * 2 + 1
        return LayerAttentionSite(dim, taps, index, carries=carries, eps=eps, device=device, dtype=dtype)

    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """The running sum: a weighted sum of everything so far."""
        del num_sublayers
        return (Source(embedding=True, first=0, stop=site),)

    def start(self, embedding: Tensor) -> Retrieved:
        """The embedding is the running sum."""
        return Retrieved(embedding)

    def read(self, state: Retrieved, site: Site) -> Tensor:
        """The running sum."""
        del site
        return state.hidden

    def write(self, state: Retrieved, site: Site, output: Tensor) -> Retrieved:
        """Add the output and what it attends to."""
        assert isinstance(site, LayerAttentionSite)
        hidden = state.hidden
        key, before, own = self._attention(state, site, output)
        wide = output.to(own.dtype)
        attended = own * wide
        for number, held in enumerate(state.held):
            attended = attended + before[..., number, :] * held.to(own.dtype)
        total = (hidden.to(own.dtype) + wide + attended).to(hidden.dtype)
        if self.form == "light":
            return Retrieved(total, attended=attended.to(hidden.dtype))
        value = (site.value_weight.to(own.dtype) * wide).to(output.dtype)
        return Retrieved(total, (*state.values, value), keys=(*state.keys, key.to(output.dtype)))

    def read_weights(self, state: Retrieved, site: Site) -> Tensor:
        """All on the running sum, which comes first."""
        del site
        wide = torch.promote_types(state.hidden.dtype, torch.float32)
        return torch.eye(1, 1 + len(state.held), device=state.hidden.device, dtype=wide)[..., None]

    def write_weights(self, state: Retrieved, site: Site, output: Tensor) -> Tensor:
        """The running sum takes itself, the output and what is attended to; values stay, and there is one more."""
        assert isinstance(site, LayerAttentionSite)
        _, before, own = self._attention(state, site, output)
        one = torch.ones_like(own)[..., None, :]
        attended = torch.cat([0 * one, before, own[..., None, :]], dim=-2)
        plain = torch.cat([one, 0 * before, one], dim=-2)
        if self.form == "light":
            return torch.stack([plain + attended, attended], dim=-3)
        count = attended.shape[-2]
        rows = torch.eye(count, device=own.device, dtype=own.dtype)[1:, :, None].repeat(1, 1, own.shape[-1])
        rows[-1, -1] = site.value_weight.to(own.dtype)
        return torch.cat([(plain + attended)[..., None, :, :], rows.expand(*own.shape[:-1], *rows.shape)], dim=-3)

    def _attention(self, state: Retrieved, site: LayerAttentionSite, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output's key, and in ``o`` the weights ``[*batch, held, dim]`` and ``[*batch, dim]``, in float32."""
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        with without_autocast(output):
            query, key = site.filtered(output, site.query_kernel), site.filtered(output, site.key_kernel)
        keys = [earlier.to(output.dtype) for earlier in state.keys]
        scores = torch.stack([head_scores(self.heads, query, other) for other in (*keys, key)], dim=-2)
        weights = spread(scores.softmax(-2) if self.form == "base" else scores.sigmoid(), output.shape[-1])
        before, own = weights[..., :-1, :], weights[..., -1, :] * site.value_weight.to(output.dtype)
        if state.attended is not None:
            before = site.carry.to(output.dtype).expand(own.shape)[..., None, :]
        return key, before, own
