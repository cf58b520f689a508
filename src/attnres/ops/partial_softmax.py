"""A softmax over some of the sources, and its exact merge.

This is the numeric core of everything that splits a read: the two phases of Block AttnRes (paper, Algorithm 1),
sharded prefill, split kernels. A part is the pair (mix over its sources, log-sum-exp of their scores); two parts merge
into the part over the union of their sources, exactly.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnres.errors import ShapeError
from attnres.ops.depth_attention import depth_score, fold, mix
from attnres.ops.precision import check_sources, result_dtype, working_dtype


class PartialSoftmax(NamedTuple):
    """Depth attention over a subset of the sources."""

    mixed: Tensor
    """Softmax-weighted mix of the subset, ``[*batch, dim]``, in the working dtype (float32 or float64)."""
    lse: Tensor
    """Log-sum-exp of the subset's scores, ``[*batch]``, in the working dtype."""

    def merge(self, other: "PartialSoftmax") -> "PartialSoftmax":
        """The partial softmax over both subsets: ``lse = log(e^lse_a + e^lse_b)``, mixes weighted ``e^(lse_x - lse)``.

        The weights are ``sigmoid(lse_a - lse_b)`` and its complement, which neither overflow nor cancel.
        """
        lse = torch.logaddexp(self.lse, other.lse)
        mine = torch.sigmoid(self.lse - other.lse)[..., None]
        theirs = torch.sigmoid(other.lse - self.lse)[..., None]
        return PartialSoftmax(self.mixed * mine + other.mixed * theirs, lse)


def partial_softmax(
    sources: Sequence[Tensor], pseudo_query: Tensor, key_weight: Tensor | None = None, *, eps: float = 1e-6
) -> PartialSoftmax:
    """One read over a subset of its sources, ready to be merged with the rest.

    Args:
        sources: Tensors ``[*batch, dim]``, oldest first.
        pseudo_query: Learned vector of the site, ``[dim]``.
        key_weight: Scale of the key norm, ``[dim]``; None means ones.
        eps: Added to the mean square under the root of the key norm.

    Raises:
        ShapeError: There is no source, or shapes disagree.
    """
    part = inter_block(sources, pseudo_query[None], None if key_weight is None else key_weight[None], eps=eps)
    return PartialSoftmax(part.mixed[0], part.lse[0])


def inter_block(
    sources: Sequence[Tensor], pseudo_queries: Tensor, key_weights: Tensor | None = None, *, eps: float = 1e-6
) -> PartialSoftmax:
    """Phase 1: all reads of a block against the finished sources, in one pass over them.

    Possible because a pseudo-query does not depend on activations, so every read of the block is known before the block
    runs (paper, Algorithm 1, line 3). Each read folds its own key weight into its query; each source is read once.

    Args:
        sources: The finished sources ``[*batch, dim]``, oldest first.
        pseudo_queries: One per read of the block, ``[reads, dim]``.
        key_weights: One per read, ``[reads, dim]``; None means ones.
        eps: Added to the mean square under the root of the key norm.

    Returns:
        A `PartialSoftmax` with ``mixed`` of shape ``[reads, *batch, dim]`` and ``lse`` of shape ``[reads, *batch]``.

    Raises:
        ShapeError: There is no source, or shapes disagree.
    """
    check_sources(sources, pseudo_queries, key_weights)
    if pseudo_queries.dim() != 2 or (key_weights is not None and key_weights.shape != pseudo_queries.shape):
        seen = tuple(pseudo_queries.shape), None if key_weights is None else tuple(key_weights.shape)
        raise ShapeError(f"pseudo_queries and key_weights have shapes {seen[0]} and {seen[1]}; both are [reads, dim]")
    work = working_dtype(sources)
    queries = fold(pseudo_queries, key_weights, work)
    values = [source.to(work) for source in sources]
    scores = torch.stack([_block_scores(value, queries, eps) for value in values], dim=-1)
    return PartialSoftmax(mix(values, scores.softmax(dim=-1)), scores.logsumexp(dim=-1))


def intra_block(
    finished: PartialSoftmax,
    partial: Tensor | None,
    pseudo_query: Tensor,
    key_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    out_scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Phase 2: merge one read's phase-1 result with the partial sum of the running block.

    Args:
        finished: Phase-1 result of this read: ``mixed`` ``[*batch, dim]``, ``lse`` ``[*batch]``.
        partial: Partial sum ``[*batch, dim]``; None at the first site of a block, where there is none yet. (A tensor
            of zeros would be wrong: it would take softmax mass.)
        pseudo_query: Learned vector of the site, ``[dim]``.
        key_weight: Scale of the key norm, ``[dim]``; None means ones.
        eps: Added to the mean square under the root of the key norm.
        out_scale: Factor on the mix.
        dtype: Dtype of the result; by default that of the partial sum.

    Returns:
        The read ``[*batch, dim]``, equal to `depth_attention` over the finished sources and the partial sum.

    Raises:
        ShapeError: The shapes disagree, or there is neither a partial sum nor a declared dtype.
    """
    if partial is None:
        if dtype is None:
            raise ShapeError("a read without partial sum has no dtype of its own; declare the result's with dtype=")
        merged, out_dtype = finished, dtype
    else:
        check_sources([partial], pseudo_query, key_weight)
        out_dtype = result_dtype([partial], dtype)
        value = partial.to(finished.mixed.dtype)
        score = depth_score(value, fold(pseudo_query, key_weight, value.dtype), eps)
        merged = finished.merge(PartialSoftmax(value, score))
    mixed = merged.mixed if out_scale == 1.0 else merged.mixed * out_scale
    return mixed.to(out_dtype)


def _block_scores(value: Tensor, queries: Tensor, eps: float) -> Tensor:
    """Scores of one source for all reads of a block, ``[reads, *batch]``."""
    return torch.stack([depth_score(value, query, eps) for query in queries])
