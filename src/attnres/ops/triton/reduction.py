"""Second stage of a gradient that is summed over tokens.

The first stage leaves one partial sum per program in the working dtype. Here they are added in a fixed order, without
atomics, and unfolded: a gradient of ``pseudo_query * key_weight`` is one of each factor.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
# (the type checker does not know what triton.jit makes of a function)

import triton
import triton.language as tl
from torch import Tensor

from attnres.ops.triton import launch

COLUMNS = 64
ROWS = 32


def unfolded(partials: Tensor, pseudo_query: Tensor, key_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of pseudo-query and key weight from partial sums ``[programs, *pseudo_query.shape]``."""
    grad_query = launch.empty(pseudo_query.shape, pseudo_query.dtype, pseudo_query)
    grad_key = launch.absent(pseudo_query)
    if key_weight is not None:
        grad_key = launch.empty(key_weight.shape, key_weight.dtype, key_weight)
    _add_up(partials, grad_query, *launch.contiguous(pseudo_query, key_weight), grad_key)
    return grad_query, grad_key


def total(partials: Tensor, like: Tensor) -> Tensor:
    """The sum of partial sums ``[programs, *like.shape]`` in the dtype of ``like``."""
    result = launch.empty(like.shape, like.dtype, like)
    _add_up(partials, result, like, None, result)
    return result


def _add_up(partials: Tensor, grad: Tensor, query: Tensor | None, key: Tensor | None, grad_key: Tensor) -> None:
    if partials.shape[0] == 0:
        grad.zero_()
        grad_key.zero_()
        return
    with launch.on(partials):
        _sum_programs[(launch.tiles(grad.numel(), COLUMNS),)](
            partials,
            partials.shape[0],
            query,
            key,
            grad,
            grad_key,
            grad.numel(),
            COLUMNS=COLUMNS,
            ROWS=ROWS,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["programs"])
def _sum_programs(partials, programs, query, key, grad, grad_key, size, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < size
    rows = tl.arange(0, ROWS)
    sums = tl.zeros([ROWS, COLUMNS], partials.dtype.element_ty)
    for start in range(0, programs, ROWS):
        offsets = (start + rows).to(tl.int64)[:, None] * size + columns[None, :]
        sums += tl.load(partials + offsets, mask=(start + rows < programs)[:, None] & inside[None, :], other=0.0)
    folded = tl.sum(sums, axis=0)
    if key is None:
        tl.store(grad + columns, folded.to(grad.dtype.element_ty), mask=inside)
    else:
        by_key = folded * tl.load(key + columns, mask=inside, other=0.0).to(folded.dtype)
        by_query = folded * tl.load(query + columns, mask=inside, other=0.0).to(folded.dtype)
        tl.store(grad + columns, by_key.to(grad.dtype.element_ty), mask=inside)
        tl.store(grad_key + columns, by_query.to(grad_key.dtype.element_ty), mask=inside)
