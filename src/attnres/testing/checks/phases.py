"""The two phases of a block: one pass over the finished sources, then an exact merge with the partial sum."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnres.testing.adapter import Adapter, NotApplicable
from attnres.testing.inputs import DIAGNOSIS, GRADIENT, HALF, VALUE, Inputs, allowed, leaf, normals, random_inputs
from attnres.testing.outcome import Finding, each, error
from attnres.testing.registry import check

READS = 4


@check("phases.merge", "two-phase reads are the direct reads, each with its own key weight")
def merge(adapter: Adapter) -> Iterator[Finding]:
    """A block of four reads, the first without a partial sum, over three finished sources and over a single one."""
    for count in (3, 1):
        block = _block(adapter, loudness=1.0, count=count)
        yield from _compare(adapter, block, allowed(adapter.precise, 1), f"{count} finished, ")


@check("phases.16_bit", "16-bit sources are read right in two phases, and with several queries at once")
def short(adapter: Adapter) -> Iterator[Finding]:
    """As exactly as a diagnosis needs: roundings of a single read have a check of their own."""
    for dtype in HALF:
        for form in (_phases_short, _many_short):
            yield from each(form(adapter, dtype))


def _phases_short(adapter: Adapter, dtype: torch.dtype) -> Iterator[Finding]:
    block = _block(adapter, loudness=1.0, dtype=dtype)
    yield from _compare(adapter, block, DIAGNOSIS[dtype], f"{str(dtype)[6:]}, ")


def _many_short(adapter: Adapter, dtype: torch.dtype) -> Iterator[Finding]:
    finished, _, queries, weights, eps = _block(adapter, loudness=1.0, dtype=dtype)
    found = adapter.read_many(finished.sources, queries, weights, eps=eps)
    for at, value in enumerate(found):
        weight = None if weights is None else weights[at]
        right = adapter.definition.read(finished.sources, queries[at], weight, eps=eps)
        yield error(f"{str(dtype)[6:]}, query {at} of {READS}", value, right, DIAGNOSIS[dtype])


@check("phases.far_apart", "the merge neither overflows nor cancels when one phase has all the weight")
def far_apart(adapter: Adapter) -> Iterator[Finding]:
    """Scores up to ten thousand."""
    yield from _compare(
        adapter, _block(adapter, loudness=3000.0), 2.0 if adapter.precise in HALF else 100 * VALUE[adapter.precise]
    )


@check("phases.gradient", "gradients go through both phases")
def gradient(adapter: Adapter) -> Iterator[Finding]:
    """Of each finished source, each partial sum, the queries and the key weights."""
    if not adapter.has_gradient:
        raise NotApplicable("declared: forward only")
    for count in (3, 1):
        yield from _gradient(adapter, count)


def _gradient(adapter: Adapter, count: int) -> Iterator[Finding]:
    finished, partials, queries, weights, eps = _block(adapter, loudness=1.0, count=count)
    given = [*finished.sources, *partials[1:], queries, *([] if weights is None else [weights])]
    inputs, truth = [leaf(tensor) for tensor in given], [leaf(tensor.double()) for tensor in given]
    end = count + READS - 1  # where the partial sums end

    def split(tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor | None]:
        return tensors[:count], tensors[count:end], tensors[end], tensors[end + 1] if tensors[end + 1 :] else None

    far, near, vectors, scales = split(inputs)
    found = torch.stack(list(adapter.two_phase(far, [None, *near], vectors, scales, eps=eps)))
    far, near, vectors, scales = split(truth)
    exact = torch.stack(_direct(adapter, far, [far[0], *near], vectors, scales, eps))  # the first read takes none
    gradients = torch.autograd.grad(found.double().sin().sum(), inputs, allow_unused=True)
    rights = torch.autograd.grad(exact.sin().sum(), truth, materialize_grads=True)
    names = [*(f"finished source {at}" for at in range(count)), *(f"partial sum {at}" for at in range(1, READS)),
             "the queries", "the key weights"]  # fmt: skip
    for name, one, right in zip(names, gradients, rights, strict=False):
        yield error(f"{count} finished, gradient of {name}", one, right, allowed(adapter.precise, 1, GRADIENT))


_Block = tuple[Inputs, list[Tensor], Tensor, Tensor | None, float]


def _block(adapter: Adapter, *, loudness: float, count: int = 3, dtype: torch.dtype | None = None) -> _Block:
    dtype = dtype or adapter.precise
    finished, normal = random_inputs(adapter, count, 32, (2, 3), dtype=dtype, seed=90), normals(91, adapter.device)
    kind = adapter.vector_dtype(dtype)
    partials = [normal(2, 3, 32).to(dtype) for _ in range(READS)]
    queries = (normal(READS, 32) * loudness * 0.3 / adapter.definition.scale(32)).to(kind)
    weights = (1 + 0.3 * normal(READS, 32)).to(kind) if adapter.takes_key_weight else None
    return finished, partials, queries, weights, finished.eps


def _compare(adapter: Adapter, block: _Block, limit: float, case: str = "") -> Iterator[Finding]:
    finished, partials, queries, weights, eps = block
    found = adapter.two_phase(finished.sources, [None, *partials[1:]], queries, weights, eps=eps)
    exact = _direct(adapter, finished.sources, partials, queries, weights, eps)
    for at, (value, right) in enumerate(zip(found, exact, strict=True)):
        yield error(f"{case}read {at} of the block", value, right, limit)


def _direct(
    adapter: Adapter,
    finished: list[Tensor],
    partials: list[Tensor],
    queries: Tensor,
    weights: Tensor | None,
    eps: float,
) -> list[Tensor]:
    return [
        adapter.definition.read(
            [*finished, partials[at]] if at else finished,
            queries[at],
            None if weights is None else weights[at],
            eps=eps,
        )
        for at in range(READS)
    ]
