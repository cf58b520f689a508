"""Depth attention over sources that are divided by columns: each rank has some of the ``dim`` numbers of every token.

A score needs two sums over all columns, the sum of squares and the product with the query. Both are local sums first,
so two numbers per source and token cross the ranks, in one exchange, before the softmax; the mix is of own columns
again. Backward needs one more number per source and token. Everything of the sources' size stays where it is.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnres.errors import ShapeError
from attnres.ops.precision import check_sources, result_dtype, working_dtype
from attnres.ops.reference import finish, fold, only_source


def depth_attention_by_columns(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor | None = None,
    *,
    dim: int,
    group: dist.ProcessGroup,
    eps: float = 1e-6,
    out_scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A rank's columns of `attnres.ops.depth_attention`, from its columns of the sources.

    Every rank calls it, with the same tokens and as many sources. Ranks may have different numbers of columns, and
    some none. Sums, softmax and mix are float32 for every input dtype (float64 for float64 sources) and rounded once;
    a single source is returned bit for bit, without an exchange.

    Gradients of query and key weight are complete: a rank's columns of them depend on its columns of the sources only,
    so nothing is to be reduced. Kept for backward are references to the sources and two numbers per source and token.
    First derivatives only.

    Args:
        sources: Own columns ``[*batch, own dim]``, oldest first.
        pseudo_query: Own columns of the site's vector, ``[own dim]``; `own_columns` cuts them.
        key_weight: Own columns of the scale of the key norm, ``[own dim]``; None means ones.
        dim: Width D of all ranks together, over which the key norm takes its mean.
        group: The ranks among which the columns are divided.
        eps: Added to the mean square under the root.
        out_scale: Factor on the mix.
        dtype: Dtype of the result; needed only when the sources differ in dtype.

    Returns:
        Own columns of the mix, ``[*batch, own dim]``.

    Raises:
        ShapeError: There is no source, shapes disagree, ``dim`` is less than the own columns, or dtypes disagree and
            none is declared.
    """
    check_sources(sources, pseudo_query, key_weight)
    own = sources[0].shape[-1]
    if dim < max(own, 1):
        raise ShapeError(f"dim is {dim}; allowed is the width of all ranks together, at least {max(own, 1)}")
    out_dtype = result_dtype(sources, dtype)
    if len(sources) == 1:
        mixed = only_source(sources[0].to(working_dtype(sources)), pseudo_query, key_weight)
    else:
        mixed = _Read.apply(dim, group, eps, pseudo_query, key_weight, *sources)
    return finish(mixed, None, out_scale, eps, out_dtype)


def own_columns(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A rank's columns of a tensor that every rank has whole; a view.

    Runs of equal length along the last axis, the last ones shorter or empty where the ranks do not divide it, as
    `torch.chunk` cuts.
    """
    ranks, rank, dim = dist.get_world_size(group), dist.get_rank(group), value.shape[-1]
    length = -(-dim // ranks)
    start = min(rank * length, dim)
    return value.narrow(-1, start, min(length, dim - start))


class _Read(torch.autograd.Function):
    """The mix in the working dtype.

    With ``k_i = v_i r_i``, ``r_i = 1 / rms(v_i)``, query ``u`` (key weight folded in), softmax values ``p_i`` and the
    gradient ``d`` of the mix: ``ds_i = p_i (<d, v_i> - sum_j p_j <d, v_j>)``,
    ``dv_i = p_i d + ds_i r_i (u - k_i s_i / D)`` and ``du = sum_i ds_i k_i``. Only the products ``<d, v_i>`` run over
    all columns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        dim: int,
        group: dist.ProcessGroup,
        eps: float,
        pseudo_query: Tensor,
        key_weight: Tensor | None,
        *sources: Tensor,
    ) -> Tensor:
        work = working_dtype(sources)
        query = fold(pseudo_query, key_weight, work)
        sums = torch.stack([part for source in sources for part in _column_sums(source.to(work), query)])
        dist.all_reduce(sums, group=group)
        squares, products = sums.unflatten(0, (-1, 2)).unbind(1)
        inverse_rms = torch.rsqrt(squares / dim + eps)
        scores = products * inverse_rms
        weights = scores.softmax(dim=0)
        ctx.dim, ctx.group = dim, group
        ctx.save_for_backward(pseudo_query, key_weight, inverse_rms, scores, *sources)
        mixed = weights[0, ..., None] * sources[0].to(work)
        for weight, source in zip(weights[1:], sources[1:], strict=True):  # one at a time: no second copy of them all
            mixed.add_(weight[..., None] * source.to(work))
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        pseudo_query, key_weight, inverse_rms, scores, *sources = ctx.saved_tensors
        work = inverse_rms.dtype
        query, weights = fold(pseudo_query, key_weight, work), scores.softmax(dim=0)
        matches = torch.stack([(grad * source.to(work)).sum(-1) for source in sources])
        dist.all_reduce(matches, group=ctx.group)
        slopes = weights * (matches - (weights * matches).sum(0))
        pulls = slopes * inverse_rms
        pushes = pulls * inverse_rms * scores / ctx.dim
        query_grad, source_grads = torch.zeros_like(query), []
        for at, source in enumerate(sources):
            value = source.to(work)
            source_grad = weights[at, ..., None] * grad + pulls[at, ..., None] * query - pushes[at, ..., None] * value
            source_grads.append(source_grad.to(source.dtype))
            share = pulls[at, ..., None] * value
            query_grad += share.sum(tuple(range(share.ndim - 1))) if share.ndim > 1 else share
        weight = torch.ones_like(query) if key_weight is None else key_weight.to(work)
        weight_grad = None if key_weight is None else (query_grad * pseudo_query.to(work)).to(key_weight.dtype)
        return None, None, None, (query_grad * weight).to(pseudo_query.dtype), weight_grad, *source_grads


def _column_sums(value: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of squares and product with the query over the own columns, each ``[*batch]``."""
    return value.square().sum(-1), (value * query).sum(-1)
