"""Two-phase reads with gradients: what a block's reads take from the finished sources, in one pass over them.

`look_ahead` runs phase 1 for the next reads at once, and `read_near` finishes one of them when its near sources (the
partial sum) are there. Backward, `read_near` sends on what its read owes to the far sources, and only when all reads of
the block have done so are the far sources touched: once per block, not once per read.

Two things are taken from autograd's hands. The far sources' gradients travel on *carriers*: one tensor per source in
the working dtype, expanded from a single zero, so it has a shape and a gradient and no memory. Each phase 1 takes the
carriers and hands new ones on, so that the gradient of a source is summed up in float32, block by block, and rounded to
the source's dtype once. And with ``deferred`` phase 1 computes nothing: its results are expanded zeros as well, the
reads mix all their sources in one pass, and just the backward pass is in two phases. It keeps nothing of the sources'
size alive between layers, which is what activation checkpointing needs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnres.ops.library import call
from attnres.ops.partial_softmax import PartialSoftmax
from attnres.ops.precision import working_dtype


class NearSettings(NamedTuple):
    """What a read is computed with, beside its tensors."""

    eps: float
    out_scale: float
    dtype: torch.dtype
    """Of the result."""


def carrier(source: Tensor) -> Tensor:
    """A tensor of the source's shape without memory, whose gradient becomes the source's, rounded once."""
    return _Carrier.apply(source)


def look_ahead(
    sources: Sequence[Tensor],
    carriers: Sequence[Tensor],
    pseudo_queries: Tensor,
    key_weights: Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
    deferred: bool,
) -> tuple[tuple[PartialSoftmax, ...], tuple[Tensor, ...]]:
    """Phase 1 for all reads of a block.

    Args:
        sources: The finished sources ``[*batch, dim]``, oldest first.
        carriers: One per source, from `carrier` or from the phase 1 before.
        pseudo_queries: One per read, ``[reads, dim]``.
        key_weights: One per read, ``[reads, dim]``.
        eps: Of the key norm.
        dtype: Of the reads, and so of their gradients.
        deferred: Leave the forward pass to `read_near`.

    Returns:
        One partial softmax per read, and the carriers to hand on.
    """
    settings = (eps, dtype, deferred, len(sources), pseudo_queries.shape[0])
    results = _LookAhead.apply(settings, pseudo_queries, key_weights, *sources, *carriers)
    reads = pseudo_queries.shape[0]
    parts = zip(results[:reads], results[reads : 2 * reads], strict=True)
    return tuple(PartialSoftmax(*part) for part in parts), tuple(results[2 * reads :])


def read_near(
    ahead: PartialSoftmax,
    far: Sequence[Tensor],
    near: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor,
    settings: NearSettings,
) -> Tensor:
    """One read, from its phase-1 result and its near sources.

    Args:
        ahead: The read's own result of `look_ahead`.
        far: The sources of phase 1 where that was deferred, else none.
        near: The sources since, ``[*batch, dim]``, oldest first; may be none.
        pseudo_query: Of the site, ``[dim]``.
        key_weight: Of the site, ``[dim]``.
        settings: Eps, scale and dtype of the read.
    """
    return _ReadNear.apply(settings, len(far), *ahead, pseudo_query, key_weight, *far, *near)


def _without_memory(like: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return like.new_zeros(1, dtype=dtype).expand(shape)


class _Carrier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor) -> Tensor:
        ctx.dtype = source.dtype
        return _without_memory(source, source.shape, working_dtype([source]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].to(ctx.dtype)


class _LookAhead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: tuple[Any, ...], queries: Tensor, weights: Tensor, *tensors: Tensor) -> Any:
        eps, dtype, deferred, count, reads = settings
        sources, carriers = tensors[:count], tensors[count:]
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(queries, weights, *sources)
        first, work = sources[0], working_dtype(sources)
        if deferred:
            mixed = [_without_memory(first, first.shape, dtype) for _ in range(reads)]
            lse = [_without_memory(first, first.shape[:-1], work) for _ in range(reads)]
        else:
            mixed, lse = (part.unbind() for part in call("inter_block", list(sources), queries, weights, eps))
        return *mixed, *lse, *(_without_memory(each, each.shape, each.dtype) for each in carriers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        eps, _, _, count, reads = ctx.settings
        queries, weights, *sources = ctx.saved_tensors
        mixed, lse, carried = list(grads[:reads]), list(grads[reads : 2 * reads]), list(grads[2 * reads :])
        nothing = (None,) * count
        if all(grad is None for grad in (*mixed, *lse)):
            return None, None, None, *nothing, *carried
        d_sources, d_queries, d_weights = torch.ops.attnres.inter_block_backward(
            mixed, lse, sources, queries, weights, eps, carried
        )
        return None, d_queries, d_weights, *nothing, *d_sources


class _ReadNear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: NearSettings,
        far_count: int,
        mixed: Tensor,
        lse: Tensor,
        query: Tensor,
        weight: Tensor,
        *sources: Tensor,
    ) -> Tensor:
        eps, scale, dtype = settings
        near = list(sources[far_count:])
        if far_count:
            out, weights, _ = call("depth_attention", list(sources), query, weight, None, eps, scale, eps, dtype)
            weights = weights[..., far_count:].contiguous()
        else:
            out, weights, _ = call("intra_block", mixed, lse, near, None, query, weight, None, eps, scale, eps, dtype)
        ctx.settings, ctx.far_count, ctx.mixed_dtype = settings, far_count, mixed.dtype
        ctx.save_for_backward(query, weight, out if near else None, weights, *near)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        eps, scale, _ = ctx.settings
        query, weight, out, weights, *near = ctx.saved_tensors
        nothing = (None,) * ctx.far_count
        if not near:  # all of it comes from phase 1
            return None, None, grad if scale == 1.0 else grad * scale, None, None, None, *nothing
        d_mixed, d_lse, d_near, d_query, d_weight = torch.ops.attnres.intra_block_backward(
            grad, out, near, weights, query, weight, eps, scale, ctx.mixed_dtype
        )
        return None, None, d_mixed, d_lse, d_query, d_weight, *nothing, *d_near
