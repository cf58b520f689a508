"""Parameters of a model: one query and one key weight per site, with the initial values that the paper insists on."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attnres.testing.adapter import Adapter, NotApplicable
from attnres.testing.definition import Sublayer
from attnres.testing.inputs import VALUE, normals
from attnres.testing.outcome import Finding, each, error, number
from attnres.testing.registry import check
from attnres.testing.stack import SMALL, Stack


@check("init.queries", "every pseudo-query starts at exactly zero")
def queries(adapter: Adapter) -> Iterator[Finding]:
    """As the implementation makes its model."""
    for case in SMALL:
        yield from each(_initial(adapter, case, "query", 0.0))


@check("init.key_weights", "every key weight starts at exactly one")
def key_weights(adapter: Adapter) -> Iterator[Finding]:
    """As the implementation makes its model."""
    if adapter.definition.has_key_weight:
        for case in SMALL:
            yield from each(_initial(adapter, case, "key weight", 1.0))


def _initial(adapter: Adapter, case: tuple[int, int], what: str, expected: float) -> Iterator[Finding]:
    stack = Stack(adapter, *case, 16)
    there = [v for v in (stack.model.queries if what == "query" else stack.model.key_weights) if v is not None]
    if not there:
        raise NotApplicable(f"no {what}")
    values = torch.cat([vector.detach().double().flatten() for vector in there])
    seen = values[(values - expected).abs().argmax()].item()
    yield number(f"{stack.case}, {what} furthest from {expected:g}", seen, expected, 0.0)


@check("sites.own_query", "each site has a pseudo-query of its own")
def own_query(adapter: Adapter) -> Iterator[Finding]:
    """No two sites share memory."""
    for case in SMALL:
        yield from each(_own(adapter, case, "query"))


@check("sites.own_key_weight", "each site has a key weight of its own: not one per block, not one for all")
def own_key_weight(adapter: Adapter) -> Iterator[Finding]:
    """No two sites share memory."""
    if adapter.definition.has_key_weight:
        for case in SMALL:
            yield from each(_own(adapter, case, "key weight"))


def _own(adapter: Adapter, case: tuple[int, int], what: str) -> Iterator[Finding]:
    stack = Stack(adapter, *case, 16)
    vectors = stack.model.queries if what == "query" else stack.model.key_weights
    sites = [(site, vector) for site, vector in enumerate(vectors) if vector is not None]
    own = _distinct([vector for _, vector in sites])
    sublayers = [site for site, _ in sites if 0 < site < stack.num_sublayers]  # the first read needs none
    lacking = stack.num_sublayers - 1 - len(sublayers)
    expected = len(sites) + lacking
    yield Finding(where=f"{stack.case}, a {what} of its own", seen=f"{own} of {expected} reads",
                  expected=f"{expected} of {expected} reads", holds=own == expected)  # fmt: skip


def _distinct(vectors: Sequence[Tensor]) -> int:
    return len({vector.data_ptr() for vector in vectors})


@check(
    "zero_query.prenorm",
    "with zero queries and sublayers that normalise what they read, the model is the PreNorm model",
)
def prenorm(adapter: Adapter) -> Iterator[Finding]:
    """The read is the residual sum over a number, which a norm without eps takes out."""
    if adapter.definition.normalises_values:
        raise NotApplicable("the definition normalises values, so a read is no multiple of the residual sum")
    for case in SMALL:
        yield from each(_prenorm(adapter, case))


def _prenorm(adapter: Adapter, case: tuple[int, int]) -> Iterator[Finding]:
    stack = Stack(adapter, *case, 16)
    stack.zero_queries()
    normal = normals(120, adapter.device)
    sublayers = [_normed(normal(16, 16) * 0.25) for _ in range(stack.num_sublayers)]
    embedding = stack.embedding(121)
    hidden = embedding.double()
    for sublayer in sublayers:
        hidden = hidden + sublayer(hidden)
    found = direction(stack.run(embedding, sublayers).result.double())
    yield error(f"{stack.case}, normalised result", found, direction(hidden), 100 * VALUE[adapter.precise])


def direction(hidden: Tensor) -> Tensor:
    """A norm without eps, which knows no scale."""
    return hidden / hidden.square().mean(-1, keepdim=True).sqrt()


def _normed(matrix: Tensor) -> Sublayer:
    return lambda read: torch.tanh(direction(read) @ matrix.to(read.dtype))
