"""Degenerate and extreme reads."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnres.testing.adapter import Adapter, NotApplicable
from attnres.testing.checks.gradient import found_and_exact
from attnres.testing.inputs import GRADIENT, VALUE, Inputs, random_inputs
from attnres.testing.outcome import Finding, each, error, number, same_bits
from attnres.testing.registry import check

TOKENS = 4099
MANY = (33, 57, 100, 187, 300)


def _compare(where: str, adapter: Adapter, inputs: Inputs) -> Finding:
    return error(where, inputs.call(adapter), inputs.exact(adapter.definition), VALUE[inputs.sources[0].dtype])


@check("extremes.one_source", "a single source is the result, bit for bit, whatever the query", "contract")
def one_source(adapter: Adapter) -> Iterator[Finding]:
    """Only where values are the sources themselves."""
    if adapter.definition.normalises_values:
        return
    for dtype in adapter.dtypes:
        inputs = random_inputs(adapter, 1, 64, dtype=dtype, seed=40)
        yield same_bits(f"one source, {str(dtype)[6:]}", inputs.call(adapter), inputs.sources[0])


@check(
    "extremes.one_source_gradient",
    "with a single source, query and key weight have gradients of exactly zero",
    "contract",
)
def one_source_gradient(adapter: Adapter) -> Iterator[Finding]:
    """Zero, and not missing: a missing gradient looks like an unused parameter to data parallelism."""
    inputs = random_inputs(adapter, 1, 32, seed=41)
    found, exact = found_and_exact(adapter, inputs)
    yield error("the source", found[0], exact[0], GRADIENT[adapter.precise])
    for name, gradient in zip(("query", "key weight"), found[1:], strict=False):
        if gradient is None:
            yield Finding(where=f"gradient of the {name}", seen="missing", expected=0.0, holds=False)
        else:
            largest = gradient.abs().max().item()
            yield Finding(where=f"gradient of the {name}", seen=largest, expected=0.0, holds=largest == 0)


@check("extremes.identical", "identical sources give that source, whatever the query")
def identical(adapter: Adapter) -> Iterator[Finding]:
    """Four times the same numbers, in tensors of their own."""
    inputs = random_inputs(adapter, 1, 64, seed=42)
    same = Inputs([inputs.sources[0].clone() for _ in range(4)], inputs.query, inputs.key_weight, inputs.eps)
    yield _compare("four sources", adapter, same)


@check("extremes.zero_rows", "a source of zeros scores 0: value and gradients are finite and right")
def zero_rows(adapter: Adapter) -> Iterator[Finding]:
    """A whole source of zeros, one token of zeros in another, and a read of zeros only."""
    inputs = random_inputs(adapter, 3, 32, seed=43)
    inputs.sources[0].zero_()
    inputs.sources[2][1] = 0
    yield _compare("one source of zeros", adapter, inputs)
    if adapter.has_gradient:
        found, exact = found_and_exact(adapter, inputs)
        yield error("gradient of the zeros", found[0], exact[0], GRADIENT[adapter.precise])
        yield error("gradient of the query", found[3], exact[3], GRADIENT[adapter.precise])
    zeros = [torch.zeros_like(source) for source in inputs.sources]
    value = Inputs(zeros, inputs.query, inputs.key_weight, inputs.eps).call(adapter)
    yield number("only zeros, largest element", value.abs().max().item(), 0.0, 0.0)


@check("extremes.small", "very small sources are read right: eps decides, nothing is divided by zero")
def small(adapter: Adapter) -> Iterator[Finding]:
    """Down to where a float32 square is zero."""
    for loudness in (1e-4, 1e-10, 1e-25):
        yield from each(_loud(adapter, loudness))


@check("extremes.large", "very large sources are read right: no square overflows before its time")
def large(adapter: Adapter) -> Iterator[Finding]:
    """Up to where the sum of float32 squares still fits."""
    for loudness in (500, 1e4, 1e10, 1e17):
        yield from each(_loud(adapter, loudness))


def _loud(adapter: Adapter, loudness: float) -> Iterator[Finding]:
    dtype = torch.float32 if torch.float32 in adapter.dtypes else adapter.precise
    if loudness > 0.01 * torch.finfo(dtype).max:
        raise NotApplicable(f"{str(dtype)[6:]} has no numbers of size {loudness:g}")
    inputs = random_inputs(adapter, 3, 32, dtype=dtype, loudness=loudness, seed=44)
    yield _compare(f"sources of size {loudness:g}", adapter, inputs)


@check("extremes.scores", "very large scores do not overflow: the softmax saturates")
def scores(adapter: Adapter) -> Iterator[Finding]:
    """Scores up to ten thousand."""
    inputs = random_inputs(adapter, 4, 32, seed=45)
    loud = Inputs(inputs.sources, inputs.query * 3000, inputs.key_weight, inputs.eps)
    value, exact = loud.call(adapter), loud.exact(adapter.definition)
    yield error("scores up to ten thousand", value, exact, 100 * VALUE[adapter.precise])


@check("extremes.many_sources", "any number of sources is read right, or refused")
def many_sources(adapter: Adapter) -> Iterator[Finding]:
    """The 187 of the output read of Full Attention Residuals over 186 sublayers, and more."""
    for count in MANY:
        yield from each(_many(adapter, count))


def _many(adapter: Adapter, count: int) -> Iterator[Finding]:
    yield _compare(f"{count} sources", adapter, random_inputs(adapter, count, 16, (2,), seed=count))


@check("extremes.odd_widths", "any width is read right, gradients included")
def odd_widths(adapter: Adapter) -> Iterator[Finding]:
    """From 1 to 1000."""
    for dim in (1, 3, 7, 33, 129, 1000):
        yield from each(_width(adapter, dim))


def _width(adapter: Adapter, dim: int) -> Iterator[Finding]:
    inputs = random_inputs(adapter, 3, dim, (3,), seed=dim)
    yield _compare(f"width {dim}", adapter, inputs)
    if adapter.has_gradient:
        found, exact = found_and_exact(adapter, inputs)
        for name, one, right in zip(("source 0", "query"), (found[0], found[3]), (exact[0], exact[3]), strict=True):
            # with a width of 1 only the sign of a source is in its key, and the derivative is all cancellation
            yield error(
                f"width {dim}, gradient of {name}", one, right, GRADIENT[adapter.precise] * (100 if dim < 4 else 1)
            )


@check("extremes.wide", "rows as wide as those of large models are read right, gradients included")
def wide(adapter: Adapter) -> Iterator[Finding]:
    """No channel is left out."""
    for dim in (4096, 7168):
        yield from each(_width(adapter, dim))


@check("extremes.many_tokens", "thousands of tokens are read right, gradients included")
def many_tokens(adapter: Adapter) -> Iterator[Finding]:
    """No token is left out."""
    if adapter.is_interpreted:
        raise NotApplicable("runs in an interpreter, where thousands of tokens take minutes; needs a GPU")
    inputs = random_inputs(adapter, 3, 16, (TOKENS,), seed=48)
    yield _compare(f"{TOKENS} tokens", adapter, inputs)
    if adapter.has_gradient:
        found, exact = found_and_exact(adapter, inputs)
        for name, one, right in zip(("source 0", "query"), (found[0], found[3]), (exact[0], exact[3]), strict=True):
            yield error(f"{TOKENS} tokens, gradient of {name}", one, right, 10 * GRADIENT[adapter.precise])


@check("extremes.no_tokens", "a read of no tokens is empty, and its gradients are zero", "contract")
def no_tokens(adapter: Adapter) -> Iterator[Finding]:
    """As an expert without tokens or an empty shard has it."""
    for batch in ((0,), (2, 0)):
        inputs = random_inputs(adapter, 3, 16, batch, seed=46)
        value = inputs.call(adapter)
        yield Finding(where=f"batch {list(batch)}", seen=f"shape {list(value.shape)}",
                      expected=f"shape {[*batch, 16]}", holds=list(value.shape) == [*batch, 16])  # fmt: skip
        if adapter.has_gradient:
            found, _ = found_and_exact(adapter, inputs)
            yield _all_zero(f"batch {list(batch)}, gradient of the query", found[3])


def _all_zero(where: str, gradient: Tensor | None) -> Finding:
    seen = "missing" if gradient is None else gradient.abs().max().item()
    return Finding(where=where, seen=seen, expected=0.0, holds=seen == 0.0)


@check("extremes.batch_shapes", "any batch shape, none included, gives the same shape back", "contract")
def batch_shapes(adapter: Adapter) -> Iterator[Finding]:
    """From a single vector to four batch dimensions, against the same rows in one."""
    for batch in ((), (4,), (2, 3), (2, 1, 3), (1, 2, 2, 2)):
        inputs = random_inputs(adapter, 3, 16, batch, seed=47)
        rows = [source.reshape(-1, 16) for source in inputs.sources]
        flat = Inputs(rows, inputs.query, inputs.key_weight, inputs.eps).call(adapter)
        right = flat.double().reshape(*batch, 16)
        yield error(f"batch {list(batch)}", inputs.call(adapter), right, VALUE[adapter.precise])
