"""Value of a read: against the formula as a whole, and one check for each thing that public code does otherwise.

The single checks read the depth weights back from the result, so that a failure says what the formula is instead.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attnres.testing.adapter import Adapter
from attnres.testing.inputs import DIAGNOSIS, VALUE, Inputs, normals, random_inputs
from attnres.testing.outcome import Finding, each, error, number
from attnres.testing.registry import check

SHAPES: list[tuple[int, int, tuple[int, ...]]] = [
    (1, 8, (3,)),
    (2, 16, (5,)),
    (3, 64, (2, 3)),
    (5, 32, (1,)),
    (9, 128, (4,)),
    (17, 64, (2,)),
]


@check("value.float64", "in float64, a read is the formula's value")
def in_float64(adapter: Adapter) -> Iterator[Finding]:
    """All shapes, in float64."""
    yield from _values(adapter, torch.float64)


@check("value.float32", "in float32, a read is the formula's value")
def in_float32(adapter: Adapter) -> Iterator[Finding]:
    """All shapes, in float32."""
    yield from _values(adapter, torch.float32)


def _values(adapter: Adapter, dtype: torch.dtype) -> Iterator[Finding]:
    for seed, (count, dim, batch) in enumerate(SHAPES):
        yield from each(_value(adapter, count, dim, batch, dtype, seed))


def _value(
    adapter: Adapter, count: int, dim: int, batch: tuple[int, ...], dtype: torch.dtype, seed: int
) -> Iterator[Finding]:
    inputs = random_inputs(adapter, count, dim, batch, dtype=dtype, seed=seed)
    yield error(f"{count} sources of width {dim}", inputs.call(adapter), inputs.exact(adapter.definition), VALUE[dtype])


@check("value.key_weight", "keys are multiplied with a learned weight after their norm")
def key_weight(adapter: Adapter) -> Iterator[Finding]:
    """A weight far from one has its effect."""
    if not adapter.definition.has_key_weight:
        return
    if not adapter.has_key_weight:
        yield Finding(where="a read", seen="no key weight", expected="one for each read", holds=False)
        return
    inputs = random_inputs(adapter, 3, 16, seed=20)
    spread = Inputs(inputs.sources, inputs.query, (inputs.query * 3).cos() + 0.5, inputs.eps)
    exact, allowed = spread.exact(adapter.definition), VALUE[adapter.precise]
    yield error("weights from -0.5 to 1.5", spread.call(adapter), exact, allowed)


@check("value.score_scale", "scores have the definition's scale: for the paper no 1/sqrt(dim), no temperature")
def score_scale(adapter: Adapter) -> Iterator[Finding]:
    """Log-odds of two sources, over the difference of their unscaled scores."""
    pair, expected = _of_size(_pair(adapter), 1.0), adapter.definition.scale(64)
    weight = None if pair.key_weight is None else torch.ones_like(pair.key_weight)  # which has a check of its own
    inputs = Inputs(pair.sources, pair.query, weight, pair.eps)
    seen = log_odds(adapter, inputs) / (_difference(adapter, inputs, inputs.eps) / expected)
    yield number("factor on the scores", seen, expected, DIAGNOSIS[adapter.precise])


@check("value.softmax", "depth weights are a softmax: they sum to one")
def softmax(adapter: Adapter) -> Iterator[Finding]:
    """The sum of the weights of three sources whose root mean square is one."""
    inputs = random_inputs(adapter, 3, 64, (1,), seed=22)
    level = _of_size(inputs, 1.0)
    weights = _shares(level.call(adapter), torch.stack(level.sources))
    yield number("sum of weights", weights.sum().item(), 1.0, DIAGNOSIS[adapter.precise])


@check(
    "value.raw_values", "the mix is over the sources as the definition says: for the paper as they are, not normalised"
)
def raw_values(adapter: Adapter) -> Iterator[Finding]:
    """With a zero query, how much of a source ten times as large as the other is in the mean."""
    inputs = random_inputs(adapter, 2, 64, (1,), seed=23)
    quiet, loud = (source / source.norm() * 8 for source in inputs.sources)
    even = Inputs([quiet, loud * 10], torch.zeros_like(inputs.query), inputs.key_weight, inputs.eps)
    share = _shares(even.call(adapter), torch.stack(even.sources))[1].item()
    values = adapter.definition.values(even.sources, even.eps)
    expected = _shares(values.mean(0), torch.stack(even.sources))[1].item()
    yield number("share of a source of size 10", share, expected, DIAGNOSIS[adapter.precise])


@check("value.key_norm", "a source wins no weight by being large: keys are normalised")
def key_norm(adapter: Adapter) -> Iterator[Finding]:
    """Log-odds when one source is 30 times as large as it was, over those before."""
    inputs = _pair(adapter)
    louder = Inputs([inputs.sources[0] * 30, inputs.sources[1]], inputs.query, inputs.key_weight, inputs.eps)
    seen = log_odds(adapter, louder) / log_odds(adapter, inputs)
    expected = _difference(adapter, louder, inputs.eps) / _difference(adapter, inputs, inputs.eps)  # 1, but for eps
    yield number("log-odds, one source 30 times as large", seen, expected, 2 * DIAGNOSIS[adapter.precise])


@check("value.eps", "eps is added to the mean square, under the root")
def eps(adapter: Adapter) -> Iterator[Finding]:
    """Sources whose mean square is eps: a score is then 1/sqrt(2) of what it is when they are large. In each dtype."""
    for dtype in adapter.dtypes:
        pair = _pair(adapter, dtype)
        quiet, loud = _of_size(pair, math.sqrt(pair.eps)), _of_size(pair, 1.0)
        seen = log_odds(adapter, quiet) / log_odds(adapter, loud)
        expected = _difference(adapter, quiet, pair.eps) / _difference(adapter, loud, pair.eps)
        where = f"{str(dtype)[6:]}, score of small sources over that of large ones"
        yield number(where, seen, expected, 2 * DIAGNOSIS[dtype])


@check("value.several_queries", "several queries on the same sources give what each gives by itself")
def several_queries(adapter: Adapter) -> Iterator[Finding]:
    """Three queries at once, against three reads."""
    inputs, normal = random_inputs(adapter, 4, 32, (3,), seed=26), normals(27, adapter.device)
    kind = adapter.vector_dtype(adapter.precise)
    queries = torch.stack([inputs.query, *(normal(32).to(kind) for _ in range(2))])
    weights = None if inputs.key_weight is None else (1 + 0.3 * normal(3, 32)).to(kind)
    found = adapter.read_many(inputs.sources, queries, weights, eps=inputs.eps)
    for at, (query, value) in enumerate(zip(queries, found, strict=True)):
        single = adapter.read(inputs.sources, query, None if weights is None else weights[at], eps=inputs.eps)
        yield error(f"query {at} of 3", value, single.double(), VALUE[adapter.precise])


def log_odds(adapter: Adapter, inputs: Inputs) -> float:
    """Score of the first of two sources of one token less that of the second, as the result has it; nan without one.

    From the shares of the sources in the result over those that they have at a zero query: so it is about scores alone,
    whatever the mix is over.
    """
    zero = Inputs(inputs.sources, torch.zeros_like(inputs.query), inputs.key_weight, inputs.eps)
    sources = torch.stack(inputs.sources)
    shares = (_shares(inputs.call(adapter), sources) / _shares(zero.call(adapter), sources)).tolist()
    return math.log(shares[0] / shares[1]) if shares[0] > 0 and shares[1] > 0 else math.nan


def _pair(adapter: Adapter, dtype: torch.dtype | None = None) -> Inputs:
    """Two sources of one token whose scores differ by more than one, so that log-odds are worth reading."""
    for seed in range(200, 300):
        inputs = random_inputs(adapter, 2, 64, (1,), dtype=dtype, seed=seed)
        if 1 < abs(_difference(adapter, inputs, inputs.eps)) < 2:
            return inputs
    raise AssertionError("no seed will do")


def _difference(adapter: Adapter, inputs: Inputs, eps: float) -> float:
    scores = adapter.definition.scores(inputs.sources, inputs.query, inputs.key_weight, eps)
    return (scores[0] - scores[1]).item()


def _of_size(inputs: Inputs, size: float) -> Inputs:
    """The same with each source of one token scaled to a root mean square."""
    sources = [
        (source.double() / source.double().square().mean().sqrt() * size).to(source.dtype) for source in inputs.sources
    ]
    return Inputs(sources, inputs.query, inputs.key_weight, inputs.eps)


def _shares(mixed: Tensor, values: Tensor) -> Tensor:
    """How much of each value, ``[values, 1, dim]``, is in a mix of one token, by least squares."""
    matrix = values.detach().double().reshape(len(values), -1).T
    return torch.linalg.lstsq(matrix, mixed.detach().double().reshape(-1, 1)).solution[:, 0]
