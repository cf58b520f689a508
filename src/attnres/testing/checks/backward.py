"""Gradients through a whole model, and what is left of its state afterwards."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnres.testing.adapter import Adapter, NotApplicable
from attnres.testing.definition import run, sources_of
from attnres.testing.inputs import GRADIENT, HALF, allowed, leaf
from attnres.testing.outcome import Finding, each, error, same_bits
from attnres.testing.registry import check
from attnres.testing.stack import SMALL, Stack, gradients


@check(
    "backward.history", "gradients reach the embedding and every earlier output through every read: nothing is detached"
)
def history(adapter: Adapter) -> Iterator[Finding]:
    """Of the embedding, and of an offset added to each sublayer's output."""
    for case in SMALL:
        yield from each(_history(adapter, case))


def _history(adapter: Adapter, case: tuple[int, int]) -> Iterator[Finding]:
    stack = _stack(adapter, case)
    embedding, linear = stack.embedding(130).requires_grad_(), stack.linear(131)
    offsets = [torch.zeros(stack.dim, dtype=stack.dtype, device=adapter.device, requires_grad=True) for _ in linear]
    sublayers = [lambda read, f=f, o=o: f(read) + o.to(read.dtype) for f, o in zip(linear, offsets, strict=True)]
    inputs = [
        embedding,
        *offsets[:-1],
    ]  # nothing but the output read, which has a check of its own, sees the last output
    found = torch.autograd.grad(_loss(stack.run(embedding, sublayers).reads), inputs, allow_unused=True)
    truth = [leaf(embedding.double()), *(leaf(offset.double()) for offset in offsets)]
    exact_sublayers = [lambda read, f=f, o=o: f(read) + o for f, o in zip(linear, truth[1:], strict=True)]
    exact = torch.autograd.grad(_loss(stack.exact(truth[0], exact_sublayers)[:-1]), truth[:-1])
    for at, (one, right) in enumerate(zip(found, exact, strict=True)):
        name = f"output {at - 1}" if at else "the embedding"
        yield error(f"{stack.case}, gradient of {name}", one, right, 10 * GRADIENT[adapter.precise])


@check("backward.output", "gradients reach the embedding and every output through the output read")
def output(adapter: Adapter) -> Iterator[Finding]:
    """With sublayers that do not depend on what they read, so that there is no other way."""
    for case in SMALL:
        yield from each(_output(adapter, case))


def _output(adapter: Adapter, case: tuple[int, int]) -> Iterator[Finding]:
    stack = _stack(adapter, case)
    rows = [stack.embedding(140 + at).requires_grad_() for at in range(stack.num_sublayers + 1)]
    result = stack.run(rows[0], [lambda _, row=row: row + 0 for row in rows[1:]]).result
    found = torch.autograd.grad(_loss([result]), rows, allow_unused=True)
    truth = [leaf(row.double()) for row in rows]
    exact = torch.autograd.grad(
        _loss([stack.exact(truth[0], [lambda _, row=row: row for row in truth[1:]])[-1]]), truth
    )
    for at, (one, right) in enumerate(zip(found, exact, strict=True)):
        name = f"output {at - 1}" if at else "the embedding"
        yield error(f"{stack.case}, gradient of {name}", one, right, 10 * GRADIENT[adapter.precise])


@check("backward.parameters", "the query and key weight of every sublayer get the gradient of Eq. 2-6")
def parameters(adapter: Adapter) -> Iterator[Finding]:
    """But for the first read, which has a single source: there they are zero or missing."""
    for case in SMALL:
        yield from each(_parameters(adapter, case))


def _parameters(adapter: Adapter, case: tuple[int, int]) -> Iterator[Finding]:
    stack = _stack(adapter, case)
    embedding, linear = stack.embedding(132), stack.linear(133)
    kinds = (("query", stack.model.queries), ("key weight", stack.model.key_weights))
    sites = [
        (what, site, vector)
        for what, vectors in kinds
        for site, vector in enumerate(vectors)
        if vector is not None and 0 < site < stack.num_sublayers
    ]
    found = _found(_loss(stack.run(embedding, linear).reads), [vector for *_, vector in sites])
    queries = [leaf(query) for query in stack.exact_queries()]
    weights = [None if weight is None else leaf(weight) for weight in stack.exact_weights()]
    reads = run(adapter.definition, embedding, linear, queries, weights,
                sublayers_per_block=stack.sublayers_per_block, eps=stack.eps)  # fmt: skip
    chosen = [queries[site] if what == "query" else weights[site] for what, site, _ in sites]
    wanted = [vector for vector in chosen if vector is not None]
    exact = torch.autograd.grad(_loss(reads[:-1]), wanted, materialize_grads=True)
    for (what, site, _), one, right in zip(sites, found, exact, strict=True):
        gradient = None if one is None else one.flatten()
        # in bfloat16 every sublayer's output is rounded on the way, in attnres as elsewhere
        limit = (50 if adapter.precise in HALF else 10) * GRADIENT[adapter.precise]
        yield error(f"{stack.case}, {what} of read {site}", gradient, right, limit)


def _found(loss: Tensor, vectors: list[Tensor]) -> list[Tensor | None]:
    if not all(vector.requires_grad for vector in vectors):
        raise NotApplicable("the model's vectors do not require gradients")
    return gradients(loss, vectors)


@check("backward.output_parameters", "the query and key weight of the output read get the gradient of Eq. 2-6")
def output_parameters(adapter: Adapter) -> Iterator[Finding]:
    """With sublayers that do not depend on what they read, so that only the output read is judged."""
    for case in SMALL:
        yield from each(_output_parameters(adapter, case))


def _output_parameters(adapter: Adapter, case: tuple[int, int]) -> Iterator[Finding]:
    stack = _stack(adapter, case)
    rows = [stack.embedding(150 + at) for at in range(stack.num_sublayers + 1)]
    kinds = (("query", stack.model.queries), ("key weight", stack.model.key_weights))
    last = {what: vectors[-1] for what, vectors in kinds if len(vectors) == len(rows)}
    there = {what: vector for what, vector in last.items() if vector is not None}
    if not there:
        raise NotApplicable("the output read has no query and no key weight")
    result = stack.run(rows[0], [lambda read, row=row: torch.zeros_like(read) + row for row in rows[1:]]).result
    found = _found(_loss([result]), list(there.values()))
    query, weight = leaf(stack.exact_queries()[-1]), stack.exact_weights()[-1]
    weight = None if weight is None else leaf(weight)
    sources = sources_of(len(rows) - 1, rows[0].double(), [row.double() for row in rows[1:]], stack.sublayers_per_block)
    exact = adapter.definition.read(sources, query, weight, eps=stack.eps)
    truth = {"query": query} | ({} if weight is None else {"key weight": weight})
    rights = torch.autograd.grad(_loss([exact]), [truth[what] for what in there])
    for what, one, right in zip(there, found, rights, strict=True):
        gradient = None if one is None else one.flatten()
        limit = allowed(adapter.precise, 10, GRADIENT)
        yield error(f"{stack.case}, {what} of the output read", gradient, right, limit)


@check("backward.state", "after a backward pass nothing is left over: the next forward and backward have the same bits")
def state(adapter: Adapter) -> Iterator[Finding]:
    """A bank that is kept, or appended to twice, shows here."""
    for case in SMALL:
        yield from each(_state(adapter, case))


def _state(adapter: Adapter, case: tuple[int, int]) -> Iterator[Finding]:
    stack = _stack(adapter, case)
    sublayers = stack.linear(135)
    results = []
    for _ in range(2):
        embedding = stack.embedding(134).requires_grad_()
        trace = stack.run(embedding, sublayers)
        (gradient,) = torch.autograd.grad(_loss(trace.all_reads), [embedding])
        results.append((trace.result, gradient))
    for name, first, second in zip(("result", "gradient of the embedding"), *results, strict=True):
        yield same_bits(f"{stack.case}, {name} of a second pass", second, first)


@check(
    "backward.given",
    "what sublayers return, and the embedding, is never written to: no block is overwritten",
    "contract",
)
def given(adapter: Adapter) -> Iterator[Finding]:
    """Without gradients, as in inference, where memory is reused, and with them."""
    for case in SMALL:
        for with_gradients in (False, True):
            yield from each(_given(adapter, case, with_gradients))


def _given(adapter: Adapter, case: tuple[int, int], with_gradients: bool) -> Iterator[Finding]:
    stack = _stack(adapter, case)
    embedding = stack.embedding(136)
    before = embedding.clone()
    with torch.set_grad_enabled(with_gradients):
        trace = stack.run(embedding, stack.linear(137))
    yield same_bits(f"{stack.case}, the embedding", embedding, before)
    for at, (output, original) in enumerate(zip(trace.outputs, trace.originals, strict=True)):
        yield same_bits(f"{stack.case}, output {at}", output, original)


def _stack(adapter: Adapter, case: tuple[int, int]) -> Stack:
    stack = Stack(adapter, *case, 16)
    stack.randomise(138, 1.5)
    return stack


def _loss(reads: list[Tensor]) -> Tensor:
    """A number that depends on every read, each in another way."""
    return torch.stack([(read.double() * (1 + site)).sin().sum() for site, read in enumerate(reads)]).sum()
