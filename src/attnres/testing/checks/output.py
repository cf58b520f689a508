"""The output read: after the last sublayer the history is read once more, with a query and a key weight of its own."""

from collections.abc import Iterator

import torch

from attnres.testing.adapter import Adapter
from attnres.testing.inputs import DIAGNOSIS, allowed
from attnres.testing.outcome import Finding, each, error, number
from attnres.testing.registry import check
from attnres.testing.stack import CASES, SMALL, Stack


@check("output.mean", "at zero queries the result is the mean of all sources, not their sum and not the last of them")
def mean(adapter: Adapter) -> Iterator[Finding]:
    """Silent sublayers: what is left is the embedding over the number of sources."""
    if adapter.definition.normalises_values:
        return
    for num_sublayers, size in CASES:
        yield from each(_mean(adapter, num_sublayers, size))


def _mean(adapter: Adapter, num_sublayers: int, size: int) -> Iterator[Finding]:
    stack = Stack(adapter, num_sublayers, size, 16)
    stack.zero_queries()
    embedding = stack.embedding(110)
    result = stack.run(embedding, [torch.zeros_like] * num_sublayers).result
    share = (result.detach().double() / embedding.double()).flatten()
    sources = -(-num_sublayers // size) + 1
    yield number(
        f"{stack.case}, share of the embedding", share.median().item(), 1 / sources, DIAGNOSIS[adapter.precise]
    )


@check("output.query", "the output read has a pseudo-query of its own")
def query(adapter: Adapter) -> Iterator[Finding]:
    """One more query than sublayers."""
    stack = Stack(adapter, *_first(adapter), 16)
    yield _present("a query for the output read", stack.model.queries, stack.num_sublayers)


@check("output.key_weight", "the output read has a key weight of its own")
def key_weight(adapter: Adapter) -> Iterator[Finding]:
    """One more key weight than sublayers."""
    if not adapter.definition.has_key_weight:
        return
    stack = Stack(adapter, *_first(adapter), 16)
    yield _present("a key weight for the output read", stack.model.key_weights, stack.num_sublayers)


@check("output.value", "with random queries and key weights, the output read is Eq. 2-6")
def value(adapter: Adapter) -> Iterator[Finding]:
    """With linear sublayers, in each dtype."""
    for dtype in adapter.dtypes:
        for case in SMALL:
            yield from each(_value(adapter, case, dtype))


def _value(adapter: Adapter, case: tuple[int, int], dtype: torch.dtype) -> Iterator[Finding]:
    stack = Stack(adapter, *case, 16, dtype=dtype)
    stack.randomise(111, 1.5)
    embedding, sublayers = stack.embedding(112), stack.linear(113)
    trace = stack.run(embedding, sublayers)
    # by the definition from what the sublayers really put out, so that only the output read is judged
    exact = stack.exact(embedding, stack.given(trace))[-1]
    yield error(f"{str(dtype)[6:]}, {stack.case}, output read", trace.result, exact, allowed(dtype, 10))


def _present(where: str, vectors: object, site: int) -> Finding:
    assert hasattr(vectors, "__len__")
    there = len(vectors) > site and vectors[site] is not None  # pyright: ignore[reportArgumentType, reportIndexIssue]
    return Finding(where=where, seen="present" if there else "absent", expected="present", holds=there)


def _first(adapter: Adapter) -> tuple[int, int]:
    """The first case that the implementation can be built in."""
    from attnres.testing.adapter import NotApplicable

    reason = NotApplicable("no model")
    for case in CASES:
        try:
            Stack(adapter, *case, 16)
        except NotApplicable as answer:
            reason = answer
        else:
            return case
    raise reason
