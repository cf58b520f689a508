"""The arithmetic that all kernels share: score of a row, online softmax, folded query."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
# (the type checker does not know what triton.jit makes of a function)

import triton
import triton.language as tl


@triton.jit
def folded_query(pseudo_query, key_weight, columns, mask, WORK: tl.constexpr):
    """``pseudo_query * key_weight`` in the working dtype; a key weight of None means ones."""
    query = tl.load(pseudo_query + columns, mask=mask, other=0.0).to(WORK)
    if key_weight is not None:
        query = query * tl.load(key_weight + columns, mask=mask, other=0.0).to(WORK)
    return query


@triton.jit
def two_sums(first, second):
    """The sums of two rows in one reduction, so that the program's warps meet once."""
    return tl.split(tl.sum(tl.join(first, second), axis=0))


@triton.jit
def inverse_rms(squares, eps, WIDTH: tl.constexpr, WORK: tl.constexpr):
    """``1 / sqrt(squares / width + eps)``; eps arrives in 64 bits and is rounded to the working dtype."""
    return tl.rsqrt(squares / WIDTH + tl.full([], eps, WORK))


@triton.jit
def score_row(value, query, eps, WIDTH: tl.constexpr, WORK: tl.constexpr):
    """Score of a row and its inverse root mean square."""
    squares, product = two_sums(value * value, value * query)
    inverse = inverse_rms(squares, eps, WIDTH, WORK)
    return product * inverse, inverse


@triton.jit
def absorb(first, value, score, peak, total, mixed):
    """One more source in an online softmax: ``mixed / total`` is the mix so far, ``peak + log(total)`` its lse.

    The first source replaces whatever stands in the state. (Starting from a peak of minus infinity instead would make
    a first score of minus infinity NaN, which the softmax of all scores at once does not.)
    """
    raised = tl.where(first, score, tl.maximum(peak, score))
    fade = tl.where(first, 0.0, tl.exp(peak - raised))
    gain = tl.where(first, 1.0, tl.exp(score - raised))
    return raised, total * fade + gain, mixed * fade + value * gain


@triton.jit
def put(vector, index, slots, value):
    """The vector with one slot replaced."""
    return tl.where(slots == index, value, vector)


@triton.jit
def pick(vector, index, slots):
    """One slot of a vector, whatever (NaN included) the others hold."""
    return tl.sum(tl.where(slots == index, vector, 0.0), axis=0)


@triton.jit
def normalised(mixed, norm_weight, result, eps, columns, mask, WIDTH: tl.constexpr, WORK: tl.constexpr):
    """The norm that follows a read: ``mixed * rsqrt(mean(mixed^2) + eps) * norm_weight``.

    The read and the normalised value are each rounded to the type that ``result`` points to, as when the norm is an
    operator of its own.
    """
    mixed = mixed.to(result.dtype.element_ty).to(WORK)
    inverse = inverse_rms(tl.sum(mixed * mixed, axis=0), eps, WIDTH, WORK)
    scaled = (mixed * inverse).to(result.dtype.element_ty).to(WORK)
    return scaled * tl.load(norm_weight + columns, mask=mask, other=0.0).to(WORK)
