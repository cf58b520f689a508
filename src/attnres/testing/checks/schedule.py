"""The schedule, seen from outside: with constant one-hot sublayers, a read says by itself what it is made of."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnres.testing.adapter import Adapter
from attnres.testing.inputs import DIAGNOSIS, allowed
from attnres.testing.outcome import Finding, each, error
from attnres.testing.registry import check
from attnres.testing.stack import CASES, LOUD, SMALL, Stack, Trace


@check(
    "schedule.counts",
    "at zero queries each read is the mean of its sources: the embedding, finished blocks, partial sum",
)
def counts(adapter: Adapter) -> Iterator[Finding]:
    """Each output and the embedding occur once, and nothing else takes weight."""
    for num_sublayers, size in CASES:
        yield from each(_ledger(adapter, num_sublayers, size, loudness=0.0))


@check("schedule.members", "each source has the right members: outputs of one block share a weight, others do not")
def members(adapter: Adapter) -> Iterator[Finding]:
    """The same with random queries, which give each source its own weight."""
    for num_sublayers, size in CASES:
        yield from each(_ledger(adapter, num_sublayers, size, loudness=0.6))


def _ledger(adapter: Adapter, num_sublayers: int, size: int, *, loudness: float) -> Iterator[Finding]:
    stack = Stack(adapter, num_sublayers, size, num_sublayers + 1)
    stack.randomise(100, loudness)
    embedding, sublayers = stack.ledger()
    found, exact = stack.run(embedding, sublayers).reads, stack.exact(embedding, sublayers)
    for site, (read, right) in enumerate(zip(found, exact, strict=False)):  # the output read has checks of its own
        seen, expected = _shares(read, num_sublayers), _shares(right, num_sublayers)
        holds = bool(((seen - expected).abs() <= DIAGNOSIS[adapter.precise] * expected.abs().max()).all())
        where = f"{stack.case}, read {site}"
        yield Finding(where=where, seen=describe(seen), expected=describe(expected), holds=holds)


def _shares(read: Tensor, num_sublayers: int) -> Tensor:
    """How much of the embedding, then of each sublayer's output, is in a read of the ledger."""
    row = read.detach().double().reshape(-1, read.shape[-1])[0][: num_sublayers + 1].roll(1)
    row[0] /= LOUD
    return row


def describe(shares: Tensor) -> str:
    """A read in words, such as ``0.33 E, 0.33 c0+c1``: what has the same share is one term."""
    terms: list[tuple[float, list[str]]] = []
    for at, share in enumerate(shares.tolist()):
        name = f"c{at - 1}" if at else "E"
        if abs(share) < 1e-9:
            continue
        if terms and at > 1 and abs(terms[-1][0] - share) <= 1e-5 * abs(share) and terms[-1][1] != ["E"]:
            terms[-1][1].append(name)
        else:
            terms.append((share, [name]))
    words = [f"{share:.3g} {'+'.join(_short(names))}" for share, names in terms]
    return ", ".join(words if len(words) < 8 else [*words[:3], "...", *words[-3:]]) or "nothing"


def _short(names: list[str]) -> list[str]:
    return names if len(names) < 4 else [names[0], "..", names[-1]]


@check("schedule.reads", "with random queries, key weights and linear sublayers, each read is Eq. 2-6")
def reads(adapter: Adapter) -> Iterator[Finding]:
    """Everything up to the output read, in each dtype."""
    for dtype in adapter.dtypes:
        for case in SMALL:
            yield from each(_reads(adapter, case, dtype))


def _reads(adapter: Adapter, case: tuple[int, int], dtype: torch.dtype) -> Iterator[Finding]:
    stack = Stack(adapter, *case, 16, dtype=dtype)
    stack.randomise(101, 1.5)
    embedding, sublayers = stack.embedding(102), stack.linear(103)
    trace = stack.run(embedding, sublayers)
    yield from _right(f"{str(dtype)[6:]}, ", stack, embedding, trace)


def _right(where: str, stack: Stack, embedding: Tensor, trace: Trace) -> Iterator[Finding]:
    """Each read but the output's, from what the sublayers before it really put out."""
    exact = stack.exact(embedding, stack.given(trace))
    for site, (read, right) in enumerate(zip(trace.reads, exact, strict=False)):
        yield error(f"{where}{stack.case}, read {site}", read, right, allowed(stack.dtype, 10))


@check("schedule.batch", "several sequences at once: each is read as it is by itself")
def batch(adapter: Adapter) -> Iterator[Finding]:
    """Three sequences; the result against each of them alone."""
    for case in SMALL:
        yield from each(_batch(adapter, case))


def _batch(adapter: Adapter, case: tuple[int, int]) -> Iterator[Finding]:
    stack = Stack(adapter, *case, 16)
    stack.randomise(104, 1.5)
    embedding, sublayers = stack.embedding(105, batch=3), stack.linear(106)
    trace = stack.run(embedding, sublayers)
    yield from _right("batch of 3, ", stack, embedding, trace)
    alone = torch.cat([stack.run(one, sublayers).result for one in embedding.split(1)])
    yield error(f"batch of 3, {stack.case}, result", trace.result, alone.double(), allowed(stack.dtype, 10))


@check("schedule.no_gradient", "under no_grad, as in inference, the reads are the same")
def no_gradient(adapter: Adapter) -> Iterator[Finding]:
    """The reads against the definition, and the result against the one with gradients."""
    for case in SMALL:
        yield from each(_no_gradient(adapter, case))


def _no_gradient(adapter: Adapter, case: tuple[int, int]) -> Iterator[Finding]:
    stack = Stack(adapter, *case, 16)
    stack.randomise(107, 1.5)
    embedding, sublayers = stack.embedding(108), stack.linear(109)
    with_gradients = stack.run(embedding.clone(), sublayers).result
    with torch.no_grad():
        trace = stack.run(embedding.clone(), sublayers)
    yield from _right("", stack, embedding, trace)
    yield error(f"{stack.case}, result", trace.result, with_gradients.detach().double(), allowed(stack.dtype, 10))
