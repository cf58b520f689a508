"""The two phases of a block: one pass over the finished sources, then an exact merge with the partial sum."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnres.testing.adapter import Adapter
from attnres.testing.inputs import GRADIENT, VALUE, Inputs, leaf, normals, random_inputs
from attnres.testing.outcome import Finding, error
from attnres.testing.registry import check

READS = 4


@check("phases.merge", "two-phase reads are the direct reads, each with its own key weight")
def merge(adapter: Adapter) -> Iterator[Finding]:
    """A block of four reads over three finished sources; the first has no partial sum."""
    yield from _compare(adapter, _block(adapter, loudness=1.0), VALUE[adapter.precise])


@check("phases.far_apart", "the merge neither overflows nor cancels when one phase has all the weight")
def far_apart(adapter: Adapter) -> Iterator[Finding]:
    """Scores up to ten thousand."""
    yield from _compare(adapter, _block(adapter, loudness=3000.0), 100 * VALUE[adapter.precise])


@check("phases.gradient", "gradients go through both phases")
def gradient(adapter: Adapter) -> Iterator[Finding]:
    """Of a finished source, a partial sum and the queries."""
    finished, partials, queries, weights, eps = _block(adapter, loudness=1.0)
    first, near, rest, later = finished.sources[0], partials[1], finished.sources[1:], partials[2:]
    inputs = [leaf(tensor) for tensor in (first, near, queries)]
    truth = [leaf(tensor.double()) for tensor in (first, near, queries)]
    found = adapter.two_phase([inputs[0], *rest], [None, inputs[1], *later], inputs[2], weights, eps=eps)
    exact = _direct(adapter, [truth[0], *rest], [near, truth[1], *later], truth[2], weights, eps)
    gradients = torch.autograd.grad(torch.stack(list(found)).double().sin().sum(), inputs)
    rights = torch.autograd.grad(torch.stack(exact).sin().sum(), truth)
    for name, one, right in zip(("finished source", "partial sum", "queries"), gradients, rights, strict=True):
        yield error(f"gradient of the {name}", one, right, GRADIENT[adapter.precise])


_Block = tuple[Inputs, list[Tensor], Tensor, Tensor | None, float]


def _block(adapter: Adapter, *, loudness: float) -> _Block:
    finished, normal = random_inputs(adapter, 3, 32, (2, 3), seed=90), normals(91, adapter.device)
    kind = adapter.vector_dtype(adapter.precise)
    partials = [normal(2, 3, 32).to(adapter.precise) for _ in range(READS)]
    queries = (normal(READS, 32) * loudness * 0.3 / adapter.definition.scale(32)).to(kind)
    weights = (1 + 0.3 * normal(READS, 32)).to(kind) if adapter.takes_key_weight else None
    return finished, partials, queries, weights, finished.eps


def _compare(adapter: Adapter, block: _Block, allowed: float) -> Iterator[Finding]:
    finished, partials, queries, weights, eps = block
    found = adapter.two_phase(finished.sources, [None, *partials[1:]], queries, weights, eps=eps)
    exact = _direct(adapter, finished.sources, partials, queries, weights, eps)
    for at, (value, right) in enumerate(zip(found, exact, strict=True)):
        yield error(f"read {at} of the block", value, right, allowed)


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
