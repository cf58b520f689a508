"""Kernels that walk over the width in tiles: any width, any number of sources and of reads.

Three steps are enough for all operators and their gradients, with small tensors ``[tokens, reads, sources]`` between
them: `statistics` reduces rows to scores and slopes, `gather` sums weighted rows (over the sources of a token, or over
those of many tokens, in a fixed order), and `combine` builds the gradient of each source.

They serve rows that are too wide for registers, and the backward of phase 1, where the gradients of all reads and all
sources of a token meet.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
# (the type checker does not know what triton.jit makes of a function)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnres.ops.triton import launch
from attnres.ops.triton.rows import Rows, load_coded, store_coded

SOURCES = 16
"""Sources in one tile."""
READS = 4
"""Reads in one tile."""
COLUMNS = 1024
"""Columns in one tile."""
ELEMENTS = 8192
"""Elements of the largest tensor that a program holds, 32 in each thread."""
WARPS = 8


@dataclass(frozen=True)
class Tile:
    """Sizes of one program's tile, each a power of two."""

    reads: int
    sources: int
    columns: int


def tile_of(width: int, sources: int, reads: int = 1) -> Tile:
    """As many columns as fit beside the reads and sources of a tile."""
    sources = min(SOURCES, launch.power_of_two(sources))
    reads = min(READS, launch.power_of_two(reads))
    columns = min(COLUMNS, max(16, launch.power_of_two(width)))
    return Tile(reads, sources, min(ELEMENTS // (sources * reads), columns))


def statistics(
    rows: Rows, queries: Tensor, eps: float, grads: Rows | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scores ``[tokens, reads, sources]``, inverse root mean squares ``[tokens, sources]``, and slopes like the scores.

    Args:
        rows: The sources.
        queries: Folded queries ``[reads, width]`` in the working dtype.
        eps: Added to the mean square under the root.
        grads: One gradient row per read; a slope is its product with a source. None gives no slopes.
    """
    work, reads = queries.dtype, queries.shape[0]
    scores = launch.empty((rows.tokens, reads, rows.count), work, queries)
    inverses = launch.empty((rows.tokens, rows.count), work, queries)
    slopes = None if grads is None else launch.empty(scores.shape, work, queries)
    tile = tile_of(rows.width, rows.count, reads)
    read_bytes = work.itemsize + (0 if grads is None else grads.itemsize)
    round_bytes = tile.columns * (tile.sources * rows.itemsize + tile.reads * read_bytes)
    if scores.numel():
        with launch.on(queries):
            _statistics[(rows.tokens, launch.tiles(reads, tile.reads), launch.tiles(rows.count, tile.sources))](
                rows.table(),
                None if grads is None else grads.table(),
                queries,
                scores,
                inverses,
                slopes,
                rows.count,
                reads,
                eps,
                WIDTH=rows.width,
                READS=tile.reads,
                SOURCES=tile.sources,
                COLUMNS=tile.columns,
                LAYOUT=rows.listed_layout,
                GRAD_LAYOUT=None if grads is None else grads.listed_layout,
                WORK=launch.TYPES[work],
                STAGES=launch.stages_of(round_bytes),
                num_warps=WARPS,
            )
    return scores, inverses, slopes


def gather(rows: Rows, weights: Tensor, groups: int) -> Tensor:
    """``sum_i weights[token, read, i] * source_i[token]`` over the tokens of a group: ``[groups, reads, width]``.

    Group ``g`` is tokens ``g, g + groups, ...``, added in this order; with as many groups as tokens it is the mix.
    """
    reads = weights.shape[1]
    result = launch.empty((groups, reads, rows.width), weights.dtype, weights)
    tile = tile_of(rows.width, rows.count, reads)
    if result.numel():
        with launch.on(weights):
            _gather[(groups, launch.tiles(rows.width, tile.columns), launch.tiles(reads, tile.reads))](
                rows.table(),
                weights.contiguous(),
                result,
                rows.count,
                reads,
                rows.tokens,
                WIDTH=rows.width,
                READS=tile.reads,
                SOURCES=tile.sources,
                COLUMNS=tile.columns,
                LAYOUT=rows.listed_layout,
                WORK=launch.TYPES[weights.dtype],
                STAGES=launch.stages_of(tile.columns * tile.sources * rows.itemsize),
                num_warps=WARPS,
            )
    return result


def combine(
    rows: Rows,
    results: Rows,
    queries: Tensor,
    grads: Rows | None,
    by_grad: Tensor,
    by_query: Tensor,
    by_value: Tensor,
    carried: Rows | None = None,
) -> None:
    """Writes the gradient of each source into ``results``.

    ``carried_i + sum_l (by_grad[l, i] * grad_l + by_query[l, i] * query_l) + by_value[i] * source_i`` for each token.

    Args:
        rows: The sources.
        results: Where their gradients go; an absent one is skipped.
        queries: Folded queries ``[reads, width]`` in the working dtype.
        grads: One gradient row per read; None means zeros.
        by_grad: Weights ``[tokens, reads, sources]``.
        by_query: Weights ``[tokens, reads, sources]``.
        by_value: Weights ``[tokens, sources]``.
        carried: What is added to each source's gradient; None means nothing.
    """
    tile = tile_of(rows.width, rows.count)
    with launch.on(queries):
        _combine[(rows.tokens, launch.tiles(rows.width, tile.columns), launch.tiles(rows.count, tile.sources))](
            rows.table(),
            results.table(),
            None if grads is None else grads.table(),
            None if carried is None else carried.table(),
            queries,
            *launch.contiguous(by_grad, by_query, by_value),
            rows.count,
            queries.shape[0],
            WIDTH=rows.width,
            SOURCES=tile.sources,
            COLUMNS=tile.columns,
            LAYOUT=rows.listed_layout,
            RESULT_LAYOUT=results.listed_layout,
            GRAD_LAYOUT=None if grads is None else grads.listed_layout,
            CARRIED_LAYOUT=None if carried is None else carried.listed_layout,
            WORK=launch.TYPES[queries.dtype],
            STAGES=launch.stages_of(tile.columns * (queries.dtype.itemsize + (0 if grads is None else grads.itemsize))),
            num_warps=WARPS,
        )


def groups_of(rows: Rows) -> int:
    """Groups for a sum over all tokens: enough to fill the device, few enough to add up cheaply."""
    some = rows.some
    return min(rows.tokens, launch.processors_of(some.device) if some.is_cuda else launch.INTERPRETER_PROGRAMS)


def fold(pseudo_queries: Tensor, key_weights: Tensor | None, work: torch.dtype) -> Tensor:
    """Folded queries in the working dtype."""
    queries = pseudo_queries.to(work)
    return (queries if key_weights is None else queries * key_weights.to(work)).contiguous()


@triton.jit
def locate_rows(table, indices, token, count):
    """Where row ``token`` of several sources starts, and the codes of their dtypes; past the end they are absent."""
    there = indices < count
    address = tl.load(table + indices, mask=there, other=0)
    address += token * tl.load(table + count + indices, mask=there, other=0)
    return address, tl.load(table + 2 * count + indices, mask=there, other=4)


@triton.jit
def load_tile(address, code, columns, inside, LAYOUT: tl.constexpr, WORK: tl.constexpr):
    """The same columns of several sources, ``[sources, columns]`` in the working dtype; zeros for absent ones."""
    mask = (code != 4)[:, None] & inside[None, :]
    return load_coded(address[:, None], code[:, None], columns[None, :], mask, LAYOUT, WORK, "")


@triton.jit(do_not_specialize=["count", "reads"])
def _statistics(
    table,
    grad_table,
    queries,
    scores,
    inverses,
    slopes,
    count,
    reads,
    eps: tl.float64,
    WIDTH: tl.constexpr,
    READS: tl.constexpr,
    SOURCES: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr,
    GRAD_LAYOUT: tl.constexpr,
    WORK: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    read = tl.program_id(1) * READS + tl.arange(0, READS)
    index = tl.program_id(2) * SOURCES + tl.arange(0, SOURCES)
    squares = tl.zeros([SOURCES, COLUMNS], WORK)
    products = tl.zeros([READS, SOURCES, COLUMNS], WORK)
    gradients = tl.zeros([READS, SOURCES, COLUMNS], WORK)
    address, code = locate_rows(table, index, token, count)
    if GRAD_LAYOUT is not None:
        grad_address, grad_code = locate_rows(grad_table, read, token, reads)
    for start in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < WIDTH
        values = load_tile(address, code, columns, inside, LAYOUT, WORK)
        squares += values * values
        products += load_queries(queries, read, reads, columns, inside, WIDTH)[:, None, :] * values[None, :, :]
        if GRAD_LAYOUT is not None:
            grads = load_tile(grad_address, grad_code, columns, inside, GRAD_LAYOUT, WORK)
            gradients += grads[:, None, :] * values[None, :, :]
    inverse = tl.rsqrt(tl.sum(squares, axis=1) / WIDTH + tl.full([], eps, WORK))
    tl.store(inverses + token * count + index, inverse, mask=(index < count) & (tl.program_id(1) == 0))
    places = (token * reads + read[:, None]) * count + index[None, :]
    there = (read < reads)[:, None] & (index < count)[None, :]
    tl.store(scores + places, tl.sum(products, axis=2) * inverse[None, :], mask=there)
    if GRAD_LAYOUT is not None:
        tl.store(slopes + places, tl.sum(gradients, axis=2), mask=there)


@triton.jit
def load_queries(queries, read, reads, columns, inside, WIDTH: tl.constexpr):
    """The same columns of several folded queries."""
    offsets = read.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    return tl.load(queries + offsets, mask=(read < reads)[:, None] & inside[None, :], other=0.0)


@triton.jit(do_not_specialize=["count", "reads"])
def _gather(
    table,
    weights,
    result,
    count,
    reads,
    tokens: tl.int64,
    WIDTH: tl.constexpr,
    READS: tl.constexpr,
    SOURCES: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr,
    WORK: tl.constexpr,
    STAGES: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    read = tl.program_id(2) * READS + tl.arange(0, READS)
    inside = columns < WIDTH
    sums = tl.zeros([READS, COLUMNS], WORK)
    parts = tl.cdiv(count, SOURCES)
    rounds = tl.cdiv(tokens - group, tl.num_programs(0)) * parts
    for step in tl.range(0, rounds, num_stages=STAGES):
        token = group + step // parts * tl.num_programs(0)
        index = (step % parts).to(tl.int32) * SOURCES + tl.arange(0, SOURCES)
        address, code = locate_rows(table, index, token, count)
        values = load_tile(address, code, columns, inside, LAYOUT, WORK)
        places = (token * reads + read[:, None]) * count + index[None, :]
        there = (read < reads)[:, None] & (index < count)[None, :]
        chosen = tl.load(weights + places, mask=there, other=0.0)
        sums += tl.sum(chosen[:, :, None] * values[None, :, :], axis=1)
    offsets = (group * reads + read[:, None]) * WIDTH + columns[None, :]
    tl.store(result + offsets, sums, mask=(read < reads)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["count", "reads"])
def _combine(
    table,
    result_table,
    grad_table,
    carried_table,
    queries,
    by_grad,
    by_query,
    by_value,
    count,
    reads,
    WIDTH: tl.constexpr,
    SOURCES: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr,
    RESULT_LAYOUT: tl.constexpr,
    GRAD_LAYOUT: tl.constexpr,
    CARRIED_LAYOUT: tl.constexpr,
    WORK: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    index = tl.program_id(2) * SOURCES + tl.arange(0, SOURCES)
    inside, there = columns < WIDTH, index < count
    address, code = locate_rows(table, index, token, count)
    values = load_tile(address, code, columns, inside, LAYOUT, WORK)
    sums = tl.load(by_value + token * count + index, mask=there, other=0.0)[:, None] * values
    if CARRIED_LAYOUT is not None:
        address, code = locate_rows(carried_table, index, token, count)
        sums += load_tile(address, code, columns, inside, CARRIED_LAYOUT, WORK)
    for read in tl.range(0, reads, num_stages=STAGES):
        places = (token * reads + read) * count + index
        query = tl.load(queries + tl.cast(read, tl.int64) * WIDTH + columns, mask=inside, other=0.0)
        sums += tl.load(by_query + places, mask=there, other=0.0)[:, None] * query[None, :]
        if GRAD_LAYOUT is not None:
            grad_address, grad_code = locate_rows(grad_table, read + tl.arange(0, 1), token, reads)
            grad = load_tile(grad_address, grad_code, columns, inside, GRAD_LAYOUT, WORK)
            sums += tl.load(by_grad + places, mask=there, other=0.0)[:, None] * grad
    address, code = locate_rows(result_table, index, token, count)
    mask = (there & (code != 4))[:, None] & inside[None, :]
    store_coded(address[:, None], code[:, None], columns[None, :], mask, sums, RESULT_LAYOUT)
