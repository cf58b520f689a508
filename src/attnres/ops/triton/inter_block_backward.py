"""Gradients of phase 1: once per block, for all its reads together.

Scores and slopes first, for every read and source of a token; then the gradient of each source, to which every read
contributes and which may carry on an earlier float32 gradient; then those of the queries. The small tensors between
these steps go through plain tensor operations.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnres.ops.precision import working_dtype
from attnres.ops.triton import launch, reduction, tiles
from attnres.ops.triton.rows import Rows, rows_of


def inter_block_backward(
    grad_mixed: Sequence[Tensor | None],
    grad_lse: Sequence[Tensor | None],
    sources: Sequence[Tensor],
    pseudo_queries: Tensor,
    key_weights: Tensor | None,
    eps: float,
    carried: Sequence[Tensor | None],
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The operator `attnres::inter_block_backward`: gradients of sources (working dtype), queries and key weights."""
    work = working_dtype(sources)
    rows, queries = rows_of(sources), tiles.fold(pseudo_queries, key_weights, work)
    upstream, kept = some_rows(grad_mixed), some_rows(carried)
    results = [launch.empty(source.shape, work, source) for source in sources]
    scores, inverses, slopes = tiles.statistics(rows, queries, eps, upstream)
    chosen, by_score = _through_softmax(scores, slopes, _lse_rows(grad_lse, scores))
    by_query = by_score * inverses[:, None, :]
    by_value = -(by_score * scores).sum(dim=1) * inverses.square() / rows.width
    if rows.tokens:
        tiles.combine(rows, rows_of(results), queries, upstream, chosen, by_query, by_value, kept)
    partials = tiles.gather(rows, by_query, tiles.groups_of(rows))
    return results, *reduction.unfolded(partials, pseudo_queries, key_weights)


def some_rows(tensors: Sequence[Tensor | None]) -> Rows | None:
    """The rows of the tensors that are there; None if none is."""
    return None if all(tensor is None for tensor in tensors) else rows_of(tensors)


def _lse_rows(grad_lse: Sequence[Tensor | None], scores: Tensor) -> Tensor:
    absent = scores.new_zeros(scores.shape[0])
    flat = [absent if grad is None else grad.reshape(-1).to(scores.dtype) for grad in grad_lse]
    return torch.stack(flat, dim=-1) if flat else scores.new_zeros(scores.shape[:2])


def _through_softmax(scores: Tensor, slopes: Tensor | None, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
    chosen = scores.softmax(dim=-1)
    by_score = chosen * grad_lse[..., None]
    if slopes is not None:
        by_score = by_score + chosen * (slopes - (chosen * slopes).sum(dim=-1, keepdim=True))
    return chosen, by_score
