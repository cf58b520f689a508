"""Gradients of phase 2: each near source is read once, because its score and its slope need no other source."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
# (the type checker does not know what triton.jit makes of a function)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnres.ops.triton import launch, reduction, wide
from attnres.ops.triton.online import folded_query, score_row
from attnres.ops.triton.rows import load_row, plain_row, rows_of, store_row


def intra_block_backward(
    grad: Tensor,
    out: Tensor,
    near: Sequence[Tensor],
    near_weights: Tensor,
    pseudo_query: Tensor,
    key_weight: Tensor | None,
    eps: float,
    out_scale: float,
    mixed_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, list[Tensor], Tensor, Tensor]:
    """The operator `attnres::intra_block_backward`: gradients of phase-1 part, near sources and vectors."""
    work, width, batch = near_weights.dtype, grad.shape[-1], grad.shape[:-1]
    if width > launch.MAX_WIDTH:
        settings = (eps, out_scale, mixed_dtype)
        return wide.intra_block_backward(grad, out, near, near_weights, pseudo_query, key_weight, *settings)
    grad_mixed = launch.empty(grad.shape, mixed_dtype, grad)
    grad_lse = launch.empty(batch, work, grad)
    grads = [launch.empty(source.shape, source.dtype, source) for source in near]
    tokens = grad_lse.numel()
    shape = launch.shape_of(tokens, width, grad, elements=16)
    partials = launch.empty((shape.programs, width), work, grad)
    rows, grad_rows = (rows_of(near), rows_of(grads)) if near else (None, None)
    if tokens:
        with launch.on(grad):
            _intra_block_backward[(shape.programs,)](
                None if rows is None else rows.argument(),
                None if grad_rows is None else grad_rows.argument(),
                len(near),
                *launch.contiguous(grad, out, near_weights, pseudo_query, key_weight),
                grad_mixed,
                grad_lse,
                partials,
                tokens,
                eps,
                out_scale,
                WIDTH=width,
                BLOCK=shape.block,
                LAYOUT=None if rows is None else rows.layout,
                GRAD_LAYOUT=None if grad_rows is None else grad_rows.layout,
                WORK=launch.TYPES[work],
                num_warps=shape.warps,
            )
    return grad_mixed, grad_lse, grads, *reduction.unfolded(partials, pseudo_query, key_weight)


@triton.jit(do_not_specialize=["count", "tokens"])
def _intra_block_backward(
    table,
    grad_table,
    count,
    grad_rows,
    out_rows,
    weights,
    pseudo_query,
    key_weight,
    grad_mixed,
    grad_lse,
    partials,
    tokens: tl.int64,
    eps: tl.float64,
    out_scale: tl.float64,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    GRAD_LAYOUT: tl.constexpr,
    WORK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    query = folded_query(pseudo_query, key_weight, columns, mask, WORK)
    scale = tl.full([], out_scale, WORK)
    grad_query = tl.zeros([BLOCK], WORK)
    for token in range(tl.program_id(0).to(tl.int64), tokens, tl.num_programs(0)):
        grad = plain_row(grad_rows, token, columns, mask, WIDTH, WORK)
        near_share = tl.full([], 0.0, WORK)
        by_scores = tl.full([], 0.0, WORK)
        if LAYOUT is not None:
            level = tl.sum(grad * plain_row(out_rows, token, columns, mask, WIDTH, WORK), axis=0)
            for index in range(count):
                value = load_row(table, index, token, count, columns, mask, LAYOUT, WORK, "")
                weight = tl.load(weights + token * count + index)
                score, inverse = score_row(value, query, eps, WIDTH, WORK)
                by_score = weight * (scale * tl.sum(grad * value, axis=0) - level)
                along = by_score * inverse
                grad_value = (scale * weight) * grad + along * query - (along * score * inverse / WIDTH) * value
                store_row(grad_table, index, token, count, columns, mask, grad_value, GRAD_LAYOUT)
                grad_query += along * value
                near_share += weight
                by_scores += by_score
        rest = grad * (scale * (1.0 - near_share))
        tl.store(grad_mixed + token * WIDTH + columns, rest.to(grad_mixed.dtype.element_ty), mask=mask)
        tl.store(grad_lse + token, -by_scores)
    tl.store(partials + tl.program_id(0).to(tl.int64) * WIDTH + columns, grad_query, mask=mask)
