"""Phase 2 in one kernel: partial-sum update, merge of phase-1 part and near sources, and the following norm."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
# (the type checker does not know what triton.jit makes of a function)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnres.ops.triton import launch, wide
from attnres.ops.triton.online import absorb, folded_query, normalised, put, score_row
from attnres.ops.triton.rows import load_row, plain_row, rows_of


def intra_block(
    mixed: Tensor,
    lse: Tensor,
    near: Sequence[Tensor],
    update: Tensor | None,
    pseudo_query: Tensor,
    key_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    eps: float,
    out_scale: float,
    out_norm_eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator `attnres::intra_block`: the read, the weights of the near sources, and the new partial sum."""
    width, tokens = mixed.shape[-1], lse.numel()
    if width > launch.MAX_WIDTH:
        settings = (eps, out_scale, out_norm_eps, dtype)
        return wide.intra_block(mixed, lse, near, update, pseudo_query, key_weight, out_norm_weight, *settings)
    out = launch.empty(mixed.shape, dtype, mixed)
    weights = launch.empty((*lse.shape, len(near)), lse.dtype, lse)
    partial = launch.absent(mixed) if update is None else launch.empty(near[-1].shape, near[-1].dtype, mixed)
    rows = rows_of(near) if near else None
    if tokens:
        shape = launch.shape_of(tokens, width, mixed)
        with launch.on(mixed):
            _intra_block[(shape.programs,)](
                None if rows is None else rows.argument(),
                len(near),
                *launch.contiguous(mixed, lse, update, pseudo_query, key_weight, out_norm_weight),
                out,
                weights,
                None if update is None else partial,
                tokens,
                eps,
                out_scale,
                out_norm_eps,
                WIDTH=width,
                BLOCK=shape.block,
                SLOTS=1 if rows is None else rows.slots,
                LAYOUT=None if rows is None else rows.layout,
                WORK=launch.TYPES[lse.dtype],
                num_warps=shape.warps,
                maxnreg=128,
            )
    return out, weights, partial


@triton.jit(do_not_specialize=["count", "tokens"])
def _intra_block(
    table,
    count,
    mixed_rows,
    lse,
    update,
    pseudo_query,
    key_weight,
    norm_weight,
    out,
    weights,
    partial,
    tokens: tl.int64,
    eps: tl.float64,
    out_scale: tl.float64,
    out_norm_eps: tl.float64,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    WORK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    slots = tl.arange(0, SLOTS)
    query = folded_query(pseudo_query, key_weight, columns, mask, WORK)
    scale = tl.full([], out_scale, WORK)
    for token in range(tl.program_id(0).to(tl.int64), tokens, tl.num_programs(0)):
        mixed = plain_row(mixed_rows, token, columns, mask, WIDTH, WORK)
        peak = tl.load(lse + token)
        total = tl.full([], 1.0, WORK)
        if LAYOUT is not None:
            scores = tl.full([SLOTS], float("-inf"), WORK)
            finished = count if update is None else count - 1
            for index in range(finished):
                value = load_row(table, index, token, count, columns, mask, LAYOUT, WORK, "")
                score, _ = score_row(value, query, eps, WIDTH, WORK)
                scores = put(scores, index, slots, score)
                peak, total, mixed = absorb(False, value, score, peak, total, mixed)
            if update is not None:
                value = load_row(table, finished, token, count, columns, mask, LAYOUT, WORK, "")
                value += plain_row(update, token, columns, mask, WIDTH, WORK)
                rounded = value.to(partial.dtype.element_ty)
                tl.store(partial + token * WIDTH + columns, rounded, mask=mask)
                value = rounded.to(WORK)
                score, _ = score_row(value, query, eps, WIDTH, WORK)
                scores = put(scores, finished, slots, score)
                peak, total, mixed = absorb(False, value, score, peak, total, mixed)
            tl.store(weights + token * count + slots, tl.exp(scores - peak) / total, mask=slots < count)
        mixed = mixed * (scale / total)
        if norm_weight is not None:
            mixed = normalised(mixed, norm_weight, out, out_norm_eps, columns, mask, WIDTH, WORK)
        tl.store(out + token * WIDTH + columns, mixed.to(out.dtype.element_ty), mask=mask)
