"""Gradients of a read against the float64 derivative of the formula."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnres.testing.adapter import Adapter, NotApplicable
from attnres.testing.inputs import GRADIENT, Inputs, allowed, leaf, normals, random_inputs
from attnres.testing.outcome import Finding, each, error
from attnres.testing.registry import check

SHAPES: list[tuple[int, int, tuple[int, ...]]] = [(2, 16, (5,)), (3, 64, (2, 3)), (9, 32, (4,))]


@check("gradient.sources", "gradients of the sources are the formula's: through the mix and through the keys")
def sources(adapter: Adapter) -> Iterator[Finding]:
    """Each source's gradient, in the most precise dtype."""
    for seed, shape in enumerate(SHAPES):
        yield from each(_sources(adapter, shape, seed))


def _sources(adapter: Adapter, shape: tuple[int, int, tuple[int, ...]], seed: int) -> Iterator[Finding]:
    count, dim, batch = shape
    inputs = random_inputs(adapter, count, dim, batch, seed=seed)
    found, exact = found_and_exact(adapter, inputs)
    for at in range(count):
        yield error(f"source {at} of {count}", found[at], exact[at], GRADIENT[adapter.precise])


@check("gradient.query", "the gradient of the query is the formula's, summed over all tokens")
def query(adapter: Adapter) -> Iterator[Finding]:
    """Few tokens, and enough of them that a kernel needs several programs."""
    for batch in ((1,), (5,), (3, 67)):
        inputs = random_inputs(adapter, 3, 32, batch, seed=31)
        found, exact = found_and_exact(adapter, inputs)
        yield error(f"{torch.Size(batch).numel()} tokens", found[3], exact[3], GRADIENT[adapter.precise])


@check("gradient.key_weight", "the gradient of the key weight is the formula's")
def key_weight(adapter: Adapter) -> Iterator[Finding]:
    """As for the query."""
    if not adapter.takes_key_weight:
        raise NotApplicable("no key weight")
    for batch in ((5,), (3, 67)):
        inputs = random_inputs(adapter, 3, 32, batch, seed=32)
        found, exact = found_and_exact(adapter, inputs)
        yield error(f"{torch.Size(batch).numel()} tokens", found[4], exact[4], GRADIENT[adapter.precise])


@check(
    "gradient.zero_query", "at a zero query the query has a gradient, so that training starts, and the rest is finite"
)
def zero_query(adapter: Adapter) -> Iterator[Finding]:
    """Every gradient at a query of zeros; the key weight's is zero there."""
    inputs = random_inputs(adapter, 3, 32, seed=33)
    zero = Inputs(inputs.sources, torch.zeros_like(inputs.query), inputs.key_weight, inputs.eps)
    found, exact = found_and_exact(adapter, zero)
    names = [*(f"source {at}" for at in range(3)), "query", "key weight"]
    for name, one, right in zip(names, found, exact, strict=False):
        if name == "key weight" and one is not None:
            yield Finding(where=name, seen=one.abs().max().item(), expected=0.0, holds=not one.any())
        elif name != "key weight":
            yield error(name, one, right, GRADIENT[adapter.precise])


@check("gradient.only_some", "gradients of one input alone are right: the others may be frozen")
def only_some(adapter: Adapter) -> Iterator[Finding]:
    """The query alone, as when the base model is frozen, and one source alone; against all of them together."""
    for at, name in ((3, "query alone"), (1, "source 1 alone")):
        inputs = random_inputs(adapter, 3, 32, seed=34)
        right = found_and_exact(adapter, inputs)[0][at]
        chosen = inputs.leaves()
        for index, tensor in enumerate([*chosen.sources, *chosen.vectors]):
            tensor.requires_grad_(index == at)
        value = chosen.call(adapter)
        (found,) = torch.autograd.grad(value, [[*chosen.sources, *chosen.vectors][at]], _upstream(value))
        if right is None:
            yield Finding(where=f"{name}, beside the others", seen="nothing", expected="a tensor", holds=False)
        else:
            yield error(name, found, right.double(), GRADIENT[adapter.precise])


@check("gradient.several_queries", "gradients of several queries on the same sources are those of their reads together")
def several_queries(adapter: Adapter) -> Iterator[Finding]:
    """Of each source, of the queries and of the key weights."""
    if not adapter.has_gradient:
        raise NotApplicable("declared: forward only")
    inputs, normal = random_inputs(adapter, 3, 32, (5,), seed=36), normals(37, adapter.device)
    kind = inputs.query.dtype
    vectors = [torch.stack([inputs.query, *(normal(32).to(kind) for _ in range(2))])]
    if inputs.key_weight is not None:
        vectors.append((1 + 0.3 * normal(3, 32)).to(kind))
    given = [leaf(tensor) for tensor in (*inputs.sources, *vectors)]
    truth = [leaf(tensor.double()) for tensor in given]
    values = torch.stack(list(adapter.read_many(given[:3], given[3], *(given[4:] or [None]), eps=inputs.eps)))
    exact = torch.stack(
        [
            adapter.definition.read(truth[:3], truth[3][at], truth[4][at] if truth[4:] else None, eps=inputs.eps)
            for at in range(3)
        ]
    )
    upstream = _upstream(values)
    if not values.requires_grad:
        yield Finding(where="the result", seen="no gradient", expected="a gradient", holds=False)
        return
    found = torch.autograd.grad(values, given, upstream, allow_unused=True)
    rights = torch.autograd.grad(exact, truth, upstream.double(), materialize_grads=True)
    names = [*(f"source {at}" for at in range(3)), "the queries", "the key weights"]
    for name, one, right in zip(names, found, rights, strict=False):
        yield error(f"gradient of {name}", one, right, allowed(adapter.precise, 1, GRADIENT))


def found_and_exact(adapter: Adapter, inputs: Inputs) -> tuple[list[Tensor | None], list[Tensor]]:
    """Gradients of sources, query and key weight: the implementation's and the definition's.

    Raises:
        NotApplicable: Reads cannot be differentiated, as declared.
    """
    if not adapter.has_gradient:
        raise NotApplicable("declared: forward only")
    leaves = inputs.leaves()
    value = leaves.call(adapter)
    upstream = _upstream(value)
    found = torch.autograd.grad(value, [*leaves.sources, *leaves.vectors], upstream, allow_unused=True)
    truth = inputs.to(torch.float64).leaves()
    exact = torch.autograd.grad(
        truth.exact(adapter.definition), [*truth.sources, *truth.vectors], upstream.double(), materialize_grads=True
    )
    return list(found), list(exact)


def _upstream(value: Tensor) -> Tensor:
    return normals(35, str(value.device))(*value.shape).to(value.dtype)
