"""Gradients of one read, fused and recomputed from the sources alone.

Each token's rows are gone through twice (three times with an output norm, whose gradient needs the whole mix first):
once for scores and slopes, which comes from memory, and once for the gradients, which finds the rows in the L2 cache
because the same program has just read them. Gradients of query and norm weights collect in registers over a program's
tokens, leave as one partial sum per program, and are added up in a fixed order.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
# (the type checker does not know what triton.jit makes of a function)

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from attnres.ops.precision import working_dtype
from attnres.ops.triton import launch, reduction, wide
from attnres.ops.triton.online import folded_query, inverse_rms, pick, put, score_row
from attnres.ops.triton.read import mix_sources
from attnres.ops.triton.rows import load_row, plain_row, rows_of, store_row


def depth_attention_backward(
    grad_mixed: Tensor | None,
    grad_weights: Tensor | None,
    grad_lse: Tensor | None,
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    eps: float,
    out_scale: float,
    out_norm_eps: float,
    needs: Sequence[bool],
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """The operator `attnres::depth_attention_backward`: gradients of sources, query, key weight and norm weight."""
    first, work = sources[0], working_dtype(sources)
    width = first.shape[-1]
    if width > launch.MAX_WIDTH:
        return wide.depth_attention_backward(
            grad_mixed, grad_weights, grad_lse, sources, pseudo_query, key_weight, out_norm_weight, eps, out_scale,
            out_norm_eps, needs,
        )  # fmt: skip
    rows = rows_of(sources)
    grads = [
        launch.empty(source.shape, source.dtype, source) if needed else None
        for source, needed in zip(sources, needs, strict=True)
    ]
    # with a norm a program holds one more row, which leaves half the threads with twice the registers without spills
    elements, resident = (16, 16) if out_norm_weight is None else (32, 8)
    shape = launch.shape_of(rows.tokens, width, first, elements, resident)
    partials = launch.empty((shape.programs, width), work, first)
    norm_partials = None if out_norm_weight is None else launch.empty((shape.programs, width), work, first)
    if rows.tokens:
        grad_rows = rows_of(grads) if any(needs) else None
        with launch.on(first):
            _read_backward[(shape.programs,)](
                rows.argument(),
                None if grad_rows is None else grad_rows.argument(),
                rows.count,
                *launch.contiguous(pseudo_query, key_weight, out_norm_weight, grad_mixed, grad_weights, grad_lse),
                partials,
                norm_partials,
                rows.tokens,
                eps,
                out_scale,
                out_norm_eps,
                WIDTH=width,
                BLOCK=shape.block,
                SLOTS=rows.slots,
                LAYOUT=rows.layout,
                GRAD_LAYOUT=None if grad_rows is None else grad_rows.layout,
                WORK=launch.TYPES[work],
                STAGES=launch.stages_of(shape.block * rows.itemsize),
                num_warps=shape.warps,
            )
    grad_query, grad_key = reduction.unfolded(partials, pseudo_query, key_weight)
    if out_norm_weight is None or norm_partials is None:
        grad_norm = launch.absent(pseudo_query)
    else:
        grad_norm = reduction.total(norm_partials, out_norm_weight)
    present = [launch.absent(source) if grad is None else grad for source, grad in zip(sources, grads, strict=True)]
    return present, grad_query, grad_key, grad_norm


@triton.jit(do_not_specialize=["count", "tokens"])
def _read_backward(
    table,
    grad_table,
    count,
    pseudo_query,
    key_weight,
    norm_weight,
    grad_mixed,
    grad_weights,
    grad_lse,
    partials,
    norm_partials,
    tokens: tl.int64,
    eps: tl.float64,
    out_scale: tl.float64,
    out_norm_eps: tl.float64,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    GRAD_LAYOUT: tl.constexpr,
    WORK: tl.constexpr,
    STAGES: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    slots = tl.arange(0, SLOTS)
    query = folded_query(pseudo_query, key_weight, columns, mask, WORK)
    scale = tl.full([], out_scale, WORK)
    grad_query = tl.zeros([BLOCK], WORK)
    grad_norm = tl.zeros([BLOCK], WORK)
    for token in range(tl.program_id(0).to(tl.int64), tokens, tl.num_programs(0)):
        if norm_weight is not None:
            mixed, scores, inverses, _, total = mix_sources(
                table, token, count, columns, mask, slots, query, eps, WIDTH, LAYOUT, WORK, STAGES, "evict_last"
            )
            mixed = mixed * (scale / total)
            upstream = plain_row(grad_mixed, token, columns, mask, WIDTH, WORK)
            wanted, share = through_norm(upstream, mixed, norm_weight, out_norm_eps, columns, mask, WIDTH, WORK)
            grad_norm += share
            wanted = wanted * scale
            slopes = slopes_of(table, token, count, columns, mask, slots, wanted, LAYOUT, WORK, STAGES)
        else:
            wanted = plain_row(grad_mixed, token, columns, mask, WIDTH, WORK) * scale
            scores, inverses, slopes = score_and_slope(
                table, token, count, columns, mask, slots, query, wanted, eps, WIDTH, LAYOUT, WORK, STAGES
            )
        chosen, by_score = through_softmax(
            scores, slopes, grad_weights, grad_lse, token, count, slots, LAYOUT[0] == 1, WORK
        )
        grad_query = spread(
            table, grad_table, token, count, columns, mask, slots, query, wanted, grad_query,
            chosen, by_score * inverses, by_score * scores * inverses * inverses / WIDTH,
            LAYOUT, GRAD_LAYOUT, LAYOUT[0] == 1 and grad_lse is None, WORK, STAGES,
        )  # fmt: skip
    tl.store(partials + tl.program_id(0).to(tl.int64) * WIDTH + columns, grad_query, mask=mask)
    if norm_weight is not None:
        tl.store(norm_partials + tl.program_id(0).to(tl.int64) * WIDTH + columns, grad_norm, mask=mask)


@triton.jit
def through_norm(upstream, mixed, norm_weight, eps, columns, mask, WIDTH: tl.constexpr, WORK: tl.constexpr):
    """Gradient of the mix through the norm that follows it, and this token's share in that of the norm weight."""
    inverse = inverse_rms(tl.sum(mixed * mixed, axis=0), eps, WIDTH, WORK)
    weighted = upstream * tl.load(norm_weight + columns, mask=mask, other=0.0).to(WORK)
    along = tl.sum(weighted * mixed, axis=0) * inverse * inverse * inverse / WIDTH
    return weighted * inverse - mixed * along, upstream * mixed * inverse


@triton.jit
def score_and_slope(
    table, token, count, columns, mask, slots, query, wanted, eps,
    WIDTH: tl.constexpr, LAYOUT: tl.constexpr, WORK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Scores, inverse root mean squares and slopes (gradients of the depth weights) of a token's sources."""
    scores = tl.full(slots.shape, float("-inf"), WORK)
    inverses = tl.zeros(slots.shape, WORK)
    slopes = tl.zeros(slots.shape, WORK)
    for index in tl.range(0, count, num_stages=STAGES):
        value = load_row(table, index, token, count, columns, mask, LAYOUT, WORK, "evict_last")
        score, inverse = score_row(value, query, eps, WIDTH, WORK)
        scores = put(scores, index, slots, score)
        inverses = put(inverses, index, slots, inverse)
        slopes = put(slopes, index, slots, tl.sum(value * wanted, axis=0))
    return scores, inverses, slopes


@triton.jit
def slopes_of(
    table, token, count, columns, mask, slots, wanted,
    LAYOUT: tl.constexpr, WORK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Slopes alone, once the gradient of the mix is known."""
    slopes = tl.zeros(slots.shape, WORK)
    for index in tl.range(0, count, num_stages=STAGES):
        value = load_row(table, index, token, count, columns, mask, LAYOUT, WORK, "evict_last")
        slopes = put(slopes, index, slots, tl.sum(value * wanted, axis=0))
    return slopes


@triton.jit
def through_softmax(
    scores, slopes, grad_weights, grad_lse, token, count, slots, ONLY: tl.constexpr, WORK: tl.constexpr
):
    """Depth weights, and the gradient of each score."""
    raised = tl.exp(scores - tl.max(scores, axis=0))
    chosen = raised / tl.sum(raised, axis=0)
    if grad_weights is not None:
        slopes += tl.load(grad_weights + token * count + slots, mask=slots < count, other=0.0).to(WORK)
    by_score = chosen * (slopes - tl.sum(chosen * slopes, axis=0))
    if ONLY:
        chosen = tl.full(slots.shape, 1.0, WORK)
        by_score = tl.zeros(slots.shape, WORK)
    if grad_lse is not None:
        by_score += chosen * tl.load(grad_lse + token).to(WORK)
    return chosen, by_score


@triton.jit
def spread(
    table, grad_table, token, count, columns, mask, slots, query, wanted, grad_query, chosen, by_query, by_value,
    LAYOUT: tl.constexpr, GRAD_LAYOUT: tl.constexpr, EXACT: tl.constexpr, WORK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of each source: ``chosen * wanted + by_query * query - by_value * value``; collects the query's.

    With a single source and no gradient of its lse (``EXACT``) this is ``wanted``, whatever the score overflowed to.
    """
    for index in tl.range(0, count, num_stages=STAGES):
        if EXACT:
            grad = wanted
        else:
            value = load_row(table, index, token, count, columns, mask, LAYOUT, WORK, "evict_first")
            along = pick(by_query, index, slots)
            grad = pick(chosen, index, slots) * wanted + along * query - pick(by_value, index, slots) * value
            grad_query += along * value
        if GRAD_LAYOUT is not None:
            store_row(grad_table, index, token, count, columns, mask, grad, GRAD_LAYOUT)
    return grad_query
