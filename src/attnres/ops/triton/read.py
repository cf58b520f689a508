"""One read of all sources, fused: every source row comes from memory once.

A program holds one token's row in registers and takes the sources in turn with an online softmax, while the rows that
follow are on their way to shared memory. Programs are persistent: each keeps the folded query in registers and walks
over the tokens. Whatever follows the mix (scale, norm, rounding) happens in registers too.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
# (the type checker does not know what triton.jit makes of a function)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnres.ops.precision import working_dtype
from attnres.ops.triton import launch, wide
from attnres.ops.triton.online import absorb, folded_query, normalised, put, score_row
from attnres.ops.triton.rows import load_row, rows_of


def depth_attention(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    eps: float,
    out_scale: float,
    out_norm_eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator `attnres::depth_attention`: mix, depth weights and log-sum-exp."""
    first, work = sources[0], working_dtype(sources)
    batch, width = first.shape[:-1], first.shape[-1]
    if width > launch.MAX_WIDTH:
        settings = (eps, out_scale, out_norm_eps, dtype)
        return wide.depth_attention(sources, pseudo_query, key_weight, out_norm_weight, *settings)
    mixed = launch.empty(first.shape, dtype, first)
    weights = launch.empty((*batch, len(sources)), work, first)
    lse = launch.empty(batch, work, first)
    rows = rows_of(sources)
    if rows.tokens:
        shape = launch.shape_of(rows.tokens, width, first)
        with launch.on(first):
            _read[(shape.programs,)](
                rows.argument(),
                rows.count,
                *launch.contiguous(pseudo_query, key_weight, out_norm_weight),
                mixed,
                weights,
                lse,
                rows.tokens,
                eps,
                out_scale,
                out_norm_eps,
                WIDTH=width,
                BLOCK=shape.block,
                SLOTS=rows.slots,
                LAYOUT=rows.layout,
                WORK=launch.TYPES[work],
                STAGES=launch.stages_of(shape.block * rows.itemsize),
                num_warps=shape.warps,
                maxnreg=128,
            )
    return mixed, weights, lse


@triton.jit(do_not_specialize=["count", "tokens"])
def _read(
    table,
    count,
    pseudo_query,
    key_weight,
    norm_weight,
    mixed_rows,
    weights,
    lse,
    tokens: tl.int64,
    eps: tl.float64,
    out_scale: tl.float64,
    out_norm_eps: tl.float64,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    WORK: tl.constexpr,
    STAGES: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    slots = tl.arange(0, SLOTS)
    query = folded_query(pseudo_query, key_weight, columns, mask, WORK)
    scale = tl.full([], out_scale, WORK)
    for token in range(tl.program_id(0).to(tl.int64), tokens, tl.num_programs(0)):
        if LAYOUT[0] == 1:
            mixed = load_row(table, 0, token, count, columns, mask, LAYOUT, WORK, "")
            peak, _ = score_row(mixed, query, eps, WIDTH, WORK)
            total = tl.full([], 1.0, WORK)
            chosen = tl.full([SLOTS], 1.0, WORK)
            mixed = mixed * scale
        else:
            mixed, scores, _, peak, total = mix_sources(
                table, token, count, columns, mask, slots, query, eps, WIDTH, LAYOUT, WORK, STAGES, "evict_first"
            )
            chosen = tl.exp(scores - peak) / total
            mixed = mixed * (scale / total)
        if norm_weight is not None:
            mixed = normalised(mixed, norm_weight, mixed_rows, out_norm_eps, columns, mask, WIDTH, WORK)
        tl.store(mixed_rows + token * WIDTH + columns, mixed.to(mixed_rows.dtype.element_ty), mask=mask)
        tl.store(weights + token * count + slots, chosen, mask=slots < count)
        tl.store(lse + token, peak + tl.log(total))


@triton.jit
def mix_sources(
    table, token, count, columns, mask, slots, query, eps,
    WIDTH: tl.constexpr, LAYOUT: tl.constexpr, WORK: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Online softmax over a token's sources.

    Returns the unnormalised mix, all scores and inverse root mean squares, the peak and the sum of exponentials.
    """
    mixed = tl.zeros(columns.shape, WORK)
    scores = tl.full(slots.shape, float("-inf"), WORK)
    inverses = tl.zeros(slots.shape, WORK)
    peak = tl.full([], float("-inf"), WORK)
    total = tl.full([], 0.0, WORK)
    for index in tl.range(0, count, num_stages=STAGES):
        value = load_row(table, index, token, count, columns, mask, LAYOUT, WORK, EVICT)
        score, inverse = score_row(value, query, eps, WIDTH, WORK)
        scores = put(scores, index, slots, score)
        inverses = put(inverses, index, slots, inverse)
        peak, total, mixed = absorb(index == 0, value, score, peak, total, mixed)
    return mixed, scores, inverses, peak, total
