"""Phase 1: all reads of a block against the finished sources.

A program holds one token's mixes for `READS` reads in registers and takes each source row once for all of them. The
programs of one token that serve its other reads run beside it, so a row comes from memory once and from the L2 cache
for them.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
# (the type checker does not know what triton.jit makes of a function)

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from attnres.ops.precision import working_dtype
from attnres.ops.triton import launch, wide
from attnres.ops.triton.online import inverse_rms
from attnres.ops.triton.rows import load_row, rows_of

READS = 2
"""Reads that one program serves; more would not leave registers for wide rows."""


def inter_block(
    sources: Sequence[Tensor], pseudo_queries: Tensor, key_weights: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The operator `attnres::inter_block`: mixes ``[reads, *batch, width]`` and log-sum-exps ``[reads, *batch]``."""
    first, work, reads = sources[0], working_dtype(sources), pseudo_queries.shape[0]
    if first.shape[-1] > launch.MAX_WIDTH:
        return wide.inter_block(sources, pseudo_queries, key_weights, eps)
    mixed = launch.empty((reads, *first.shape), work, first)
    lse = launch.empty((reads, *first.shape[:-1]), work, first)
    rows = rows_of(sources)
    if rows.tokens and reads:
        together = min(READS, reads)
        shape = launch.shape_of(rows.tokens, rows.width, first, elements=32 // together)
        with launch.on(first):
            _inter_block[(launch.tiles(reads, together), shape.programs)](
                rows.argument(),
                rows.count,
                *launch.contiguous(pseudo_queries, key_weights),
                mixed,
                lse,
                reads,
                rows.tokens,
                eps,
                WIDTH=rows.width,
                BLOCK=shape.block,
                READS=together,
                LAYOUT=rows.layout,
                WORK=launch.TYPES[work],
                STAGES=launch.stages_of(shape.block * rows.itemsize),
                num_warps=shape.warps,
            )
    return mixed, lse


@triton.jit(do_not_specialize=["count", "reads", "tokens"])
def _inter_block(
    table,
    count,
    pseudo_queries,
    key_weights,
    mixed_rows,
    lse,
    reads,
    tokens: tl.int64,
    eps: tl.float64,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    READS: tl.constexpr,
    LAYOUT: tl.constexpr,
    WORK: tl.constexpr,
    STAGES: tl.constexpr,
):
    read = tl.program_id(0).to(tl.int64) * READS + tl.arange(0, READS)
    columns = tl.arange(0, BLOCK)[None, :]
    mask = columns < WIDTH
    inside = (read < reads)[:, None] & mask
    queries = folded_queries(pseudo_queries, key_weights, read[:, None] * WIDTH + columns, inside, WORK)
    for token in range(tl.program_id(1).to(tl.int64), tokens, tl.num_programs(1)):
        mixed = tl.zeros([READS, BLOCK], WORK)
        peak = tl.full([READS], float("-inf"), WORK)
        total = tl.zeros([READS], WORK)
        for index in tl.range(0, count, num_stages=STAGES):
            value = load_row(table, index, token, count, columns, mask, LAYOUT, WORK, "")
            inverse = inverse_rms(tl.sum(value * value, axis=1), eps, WIDTH, WORK)
            scores = tl.sum(value * queries, axis=1) * inverse
            peak, total, mixed = absorb_for_reads(index == 0, value, scores, peak, total, mixed)
        rows = read * tokens + token
        tl.store(mixed_rows + rows[:, None] * WIDTH + columns, mixed * (1.0 / total)[:, None], mask=inside)
        tl.store(lse + rows, peak + tl.log(total), mask=read < reads)


@triton.jit
def folded_queries(pseudo_queries, key_weights, offsets, mask, WORK: tl.constexpr):
    """The folded queries of several reads, ``[reads, columns]``."""
    queries = tl.load(pseudo_queries + offsets, mask=mask, other=0.0).to(WORK)
    if key_weights is not None:
        queries = queries * tl.load(key_weights + offsets, mask=mask, other=0.0).to(WORK)
    return queries


@triton.jit
def absorb_for_reads(first, value, scores, peak, total, mixed):
    """`online.absorb` for several reads of one source at once."""
    raised = tl.where(first, scores, tl.maximum(peak, scores))
    fade = tl.where(first, 0.0, tl.exp(peak - raised))
    gain = tl.where(first, 1.0, tl.exp(scores - raised))
    return raised, total * fade + gain, mixed * fade[:, None] + value * gain[:, None]
