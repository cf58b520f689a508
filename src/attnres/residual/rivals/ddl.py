"""Deep Delta Learning: before a sublayer's output is written, what the streams hold along it is erased."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from attnres.errors import ConfigError
from attnres.ops.precision import without_autocast
from attnres.residual.rivals.ddl_site import DeltaSite, ReadSite
from attnres.residual.site import Site
from attnres.residual.streams import MultiStream

Value = Literal["sigmoid", "linear", "constant"]
KEY_EPS = 1e-5
"""Keeps the direction of a vanishing output finite."""


@final
@dataclass(frozen=True, kw_only=True)
class DeepDeltaLearning(MultiStream):
    """DDL: ``X <- (I - beta k k^T) X + beta k v^T`` with X of D rows and m columns, here the streams.

    As in the authors' transformers the direction ``k`` is the sublayer's output u over its length, ``beta = 2 sigmoid``
    of a projection of the normalised read, and ``v`` (a number a stream) ``4 sigmoid`` of one of the read as it is. So
    stream j gets ``c_j u`` with ``c_j = beta (v_j - <k, X_j>) / |u|``: linear in streams and output once c is known.
    The embedding is copied into every stream; a read is a learned mix of the streams, at start their mean. It does not
    start as PreNorm: of an output only the direction is kept.

    Different here: the authors' streams pass a short convolution over positions before they are mixed, which needs a
    cache of its own in decoding and is left out; the norm before ``beta`` has no weight, which the projection absorbs;
    biases of ``v`` start at zero.

    Parameters: D (m + 1) + m + 1 a site, and m if m > 1. State: m tensors. Moves: 3m + 2 tensors a sublayer, fused.
    """

    short_name: ClassVar[str] = "ddl"
    formula: ClassVar[str] = "h = r^T X;  X <- X + beta k (w - X^T k)^T;  k = v/|v|, beta, w of h"
    citation: ClassVar[str] = "Deep Delta Learning, arXiv 2601.00417"

    streams: int = 4
    """Number of streams (the paper's d_v); 1 is the paper's vector state."""
    value: Value = "sigmoid"
    """What is written along the direction. ``"sigmoid"``: ``value_scale`` times the sigmoid of a projection of the
    read. ``"linear"``: the projection itself. ``"constant"``: half of ``value_scale``."""
    value_scale: float = 4.0
    """Upper end of the values; without effect if they are linear."""
    beta_start: float = 1.0
    """Around which the gate starts, between 0 (keep) and 2 (reflect); 1 erases."""
    beta_hidden: int = 0
    """Width of a tanh layer before the gate; 0 for a single projection."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("streams", 1), ("beta_hidden", 0)):
            number = getattr(self, name)
            if number < least:
                raise ConfigError(f"{name} is {number!r}; allowed is a whole number of {least} or more")
        if self.value not in get_args(Value):
            raise ConfigError(f'value is {self.value!r}; allowed are "sigmoid", "linear" and "constant"')
        if not 0 < self.value_scale < float("inf"):
            raise ConfigError(f"value_scale is {self.value_scale!r}; allowed is more than 0")
        if not 0 < self.beta_start < 2:
            raise ConfigError(f"beta_start is {self.beta_start!r}; allowed is more than 0 and less than 2")

    @property
    def label(self) -> str:
        """Name and streams, for tables and legends."""
        return f"DDL ({self.streams} stream{'s' if self.streams > 1 else ''})"

    @property
    def num_streams(self) -> int:
        """How many streams there are."""
        return self.streams

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with gate and values; the output site only reads."""
        if index < num_sublayers:
            return DeltaSite(
                dim,
                self.streams,
                index,
                beta_start=self.beta_start,
                beta_hidden=self.beta_hidden,
                projects_values=self.value != "constant",
                eps=eps,
                device=device,
                dtype=dtype,
            )
        return ReadSite(self.streams, device=device, dtype=dtype) if self.streams > 1 else Site()

    def pre(self, streams: Tensor, site: Site) -> Tensor:
        """The read weights; one for a single stream."""
        wide = torch.promote_types(streams.dtype, torch.float32)
        if isinstance(site, DeltaSite | ReadSite) and site.read_weight is not None:
            return site.read_weight.to(wide)
        return streams.new_ones(1, dtype=wide)

    def res_post(self, streams: Tensor, site: Site, output: Tensor) -> tuple[Tensor, Tensor]:
        """The identity, and ``c``."""
        assert isinstance(site, DeltaSite)
        wide = streams.to(torch.promote_types(streams.dtype, torch.float32))
        output = output.to(wide.dtype)
        with without_autocast(wide):
            read = (self.pre(streams, site)[..., None, :] @ wide).squeeze(-2)
            inverse = torch.rsqrt(output.square().sum(-1, keepdim=True) + KEY_EPS**2)
            held = (wide @ output[..., None]).squeeze(-1) * inverse
            change = self._beta(read, site) * (self._values(read, site) - held) * inverse
        return torch.eye(self.streams, device=wide.device, dtype=wide.dtype), change

    def _beta(self, read: Tensor, site: DeltaSite) -> Tensor:
        hidden = F.rms_norm(read, read.shape[-1:], eps=site.eps)
        if site.beta_in is not None:
            hidden = (hidden @ site.beta_in.to(read.dtype).mT).tanh()
        return 2 * (hidden @ site.beta_weight.to(read.dtype)[:, None] + site.beta_bias.to(read.dtype)).sigmoid()

    def _values(self, read: Tensor, site: DeltaSite) -> Tensor | float:
        if site.value_weight is None or site.value_bias is None:
            return self.value_scale / 2
        raw = read @ site.value_weight.to(read.dtype).mT + site.value_bias.to(read.dtype)
        return raw if self.value == "linear" else self.value_scale * raw.sigmoid()
