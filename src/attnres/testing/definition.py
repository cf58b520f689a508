"""What Attention Residuals are, in float64 and in as few lines as possible; every check compares with this.

Nothing here is shared with the operators of attnres: sources are stacked, and formulas are written as they are printed.
A variant that circulates under the same name is another `Definition`, and is checked against its own formula.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

EMBEDDING = -1
"""The embedding among the members of a source; sublayers count from 0."""

Sublayer = Callable[[Tensor], Tensor]


@final
@dataclass(frozen=True, kw_only=True)
class Definition:
    """One read: ``sum_i softmax_i(scale * <q, rms_norm(v_i) * g>) * value_i`` over the sources of one token."""

    name: str
    """Word for it in tables and JSON."""
    title: str
    """What it is, in a line."""
    has_key_weight: bool = True
    """Whether the key norm has a learned weight ``g``."""
    is_scaled: bool = False
    """Whether scores are divided by ``sqrt(dim)``."""
    normalises_values: bool = False
    """Whether the mix is over the normalised sources instead of the sources."""
    result_dtype: torch.dtype | None = None
    """Dtype of the result; None: that of the sources."""
    has_first_read: bool = True
    """Whether the first sublayer's read is a read like others; without one it takes the embedding as it is. The same
    thing where values are mixed as they are."""

    def scale(self, dim: int) -> float:
        """The factor on the scores."""
        return dim**-0.5 if self.is_scaled else 1.0

    def values(self, sources: Sequence[Tensor], eps: float) -> Tensor:
        """What is mixed, ``[sources, *batch, dim]``."""
        stacked = torch.stack([source.double() for source in sources])
        return rms_norm(stacked, eps) if self.normalises_values else stacked

    def scores(self, sources: Sequence[Tensor], query: Tensor, key_weight: Tensor | None, eps: float) -> Tensor:
        """``[sources, *batch]``."""
        keys = rms_norm(torch.stack([source.double() for source in sources]), eps)
        if key_weight is not None:
            keys = keys * key_weight.double()
        return torch.einsum("s...d,d->s...", keys, query.double()) * self.scale(keys.shape[-1])

    def weights(self, sources: Sequence[Tensor], query: Tensor, key_weight: Tensor | None, eps: float) -> Tensor:
        """The depth weights, ``[sources, *batch]``."""
        return self.scores(sources, query, key_weight, eps).softmax(0)

    def read(self, sources: Sequence[Tensor], query: Tensor, key_weight: Tensor | None, *, eps: float) -> Tensor:
        """The mix of each token, ``[*batch, dim]``."""
        weights = self.weights(sources, query, key_weight, eps)
        return torch.einsum("s...,s...d->...d", weights, self.values(sources, eps))


KIMI = Definition(name="kimi", title="Attention Residuals, arXiv 2603.15031, Eq. 2-6")
INKLING_2 = Definition(
    name="inkling-2",
    title="Inkling-2: normalised values, key norm without weight, scores over sqrt(dim), float32 result",
    has_key_weight=False,
    is_scaled=True,
    normalises_values=True,
    result_dtype=torch.float32,
    has_first_read=False,
)
DEFINITIONS = {definition.name: definition for definition in (KIMI, INKLING_2)}


def rms_norm(values: Tensor, eps: float) -> Tensor:
    """``v / sqrt(mean(v^2) + eps)`` over the last dimension."""
    return values / torch.sqrt(values.square().mean(-1, keepdim=True) + eps)


def members(site: int, sublayers_per_block: int) -> list[list[int]]:
    """What each source of a read is a sum of (Eq. 6): the embedding, whole blocks, then what the block has so far."""
    starts = range(0, site, sublayers_per_block)
    return [[EMBEDDING], *(list(range(start, min(start + sublayers_per_block, site))) for start in starts)]


def sources_of(site: int, embedding: Tensor, outputs: Sequence[Tensor], sublayers_per_block: int) -> list[Tensor]:
    """The sources of a read; there is none in place of a partial sum that has no summand yet."""
    everything = [*outputs, embedding]  # so that EMBEDDING, -1, is the embedding
    return [torch.stack([everything[at] for at in run]).sum(0) for run in members(site, sublayers_per_block)]


def run(
    definition: Definition,
    embedding: Tensor,
    sublayers: Sequence[Sublayer],
    queries: Sequence[Tensor],
    key_weights: Sequence[Tensor | None],
    *,
    sublayers_per_block: int,
    eps: float,
) -> list[Tensor]:
    """All reads of a model, one per sublayer and the output read last."""
    outputs: list[Tensor] = []
    reads = []
    for site in range(len(sublayers) + 1):
        sources = sources_of(site, embedding.double(), outputs, sublayers_per_block)
        if site or definition.has_first_read:
            reads.append(definition.read(sources, queries[site], key_weights[site], eps=eps))
        else:
            reads.append(sources[0])
        if site < len(sublayers):
            outputs.append(sublayers[site](reads[-1]).double())
    return reads
