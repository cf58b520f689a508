"""Which dtypes come out, and how often a number is rounded on the way."""

from collections.abc import Iterator

import torch

from attnres.testing.adapter import Adapter, NotApplicable
from attnres.testing.inputs import GRADIENT, HALF, Inputs, random_inputs
from attnres.testing.outcome import Finding, each, equals, error
from attnres.testing.registry import check

EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Half the distance of two numbers above one, so that a right rounding is off by at most one of these."""


@check("dtype.result", "the result has the dtype of the sources (or the one of the definition)", "contract")
def result(adapter: Adapter) -> Iterator[Finding]:
    """For each dtype it takes, with float32 parameters."""
    for dtype in adapter.dtypes:
        value = random_inputs(adapter, 3, 32, dtype=dtype, seed=50).call(adapter)
        expected = adapter.definition.result_dtype or dtype
        yield equals(f"{str(dtype)[6:]} sources", str(value.dtype)[6:], str(expected)[6:])


@check("dtype.one_rounding", "16-bit sources: scores, softmax and mix in float32, rounded once at the end", "contract")
def one_rounding(adapter: Adapter) -> Iterator[Finding]:
    """Error in units of a right rounding; float32 parameters."""
    for dtype in HALF:
        yield from each(_roundings(adapter, dtype, torch.float32))


@check(
    "dtype.16_bit_parameters", "the same with query and key weight in 16 bits: they are folded in float32", "contract"
)
def short_parameters(adapter: Adapter) -> Iterator[Finding]:
    """As after ``model.to(torch.bfloat16)``."""
    for dtype in HALF:
        yield from each(_roundings(adapter, dtype, dtype))


def _roundings(adapter: Adapter, dtype: torch.dtype, vector_dtype: torch.dtype) -> Iterator[Finding]:
    if adapter.vector_dtype(dtype) == dtype != vector_dtype:
        raise NotApplicable("declared: parameters have the dtype of the sources")
    if adapter.is_interpreted and vector_dtype == torch.bfloat16:
        raise NotApplicable("Triton's interpreter has no bfloat16 arithmetic; needs a GPU")
    inputs = random_inputs(adapter, 5, 64, (16,), dtype=dtype, vector_dtype=vector_dtype, seed=51)
    inputs = Inputs(inputs.sources, inputs.query * 2, inputs.key_weight, inputs.eps)
    value, exact = inputs.call(adapter), inputs.exact(adapter.definition)
    if value.dtype != dtype:
        raise NotApplicable(f"the result is {str(value.dtype)[6:]}")
    largest = exact.abs().max().item()
    # of elements that nearly cancel the last place is no measure; and float32 may lose a little to cancellation
    power = torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(largest / 32))))
    error_beyond = ((value.double() - exact).abs() - 2e-6 * largest).clamp_min(0)
    worst = (error_beyond / (power * EPSILON[dtype])).max().item()
    where = f"{str(dtype)[6:]}, error in half units in the last place"
    yield Finding(where=where, seen=worst, expected=1.0, holds=worst <= 1.0 + 1e-3)


@check("dtype.float16_range", "float16 sources whose squares overflow float16 are read right")
def float16_range(adapter: Adapter) -> Iterator[Finding]:
    """Elements of about a thousand."""
    inputs = random_inputs(adapter, 3, 64, dtype=torch.float16, loudness=1000, seed=52)
    yield error("elements of a thousand", inputs.call(adapter), inputs.exact(adapter.definition), 2**-10)


@check(
    "dtype.gradients",
    "16-bit sources have right gradients of their own dtype, float32 parameters float32 ones",
    "contract",
)
def gradients(adapter: Adapter) -> Iterator[Finding]:
    """Dtype and value of each gradient."""
    for dtype in HALF:
        yield from each(_gradients(adapter, dtype))


def _gradients(adapter: Adapter, dtype: torch.dtype) -> Iterator[Finding]:
    from attnres.testing.checks.gradient import found_and_exact

    inputs = random_inputs(adapter, 3, 32, dtype=dtype, seed=53)
    found, exact = found_and_exact(adapter, inputs)
    names = [*(f"source {at}" for at in range(3)), "query", "key weight"]
    for name, one, right, given in zip(names, found, exact, [*inputs.sources, *inputs.vectors], strict=False):
        if one is not None:
            yield equals(f"{str(dtype)[6:]}, dtype of the gradient of {name}", str(one.dtype)[6:], str(given.dtype)[6:])
        yield error(f"{str(dtype)[6:]}, gradient of {name}", one, right, GRADIENT[dtype])


@check(
    "dtype.mixed", "a float32 source among bfloat16 ones is refused, or does not make the result float32", "contract"
)
def mixed(adapter: Adapter) -> Iterator[Finding]:
    """A float32 embedding under autocast would otherwise turn every later sum into float32."""
    if adapter.definition.result_dtype is not None:
        raise NotApplicable("the definition says which dtype comes out")
    for dtype in (torch.float32, torch.bfloat16):
        adapter.check_limits(3, 16, dtype)
    inputs = random_inputs(adapter, 3, 16, dtype=torch.bfloat16, seed=54)
    sources = [inputs.sources[0].float(), *inputs.sources[1:]]
    try:
        value = Inputs(sources, inputs.query, inputs.key_weight, inputs.eps).call(adapter)
    except NotApplicable:
        raise
    except Exception as refusal:  # noqa: BLE001  (to refuse is right, by whatever error)
        yield Finding(where=type(refusal).__name__, seen="refused", expected="refused", holds=True)
        return
    seen = str(value.dtype)[6:]
    yield Finding(where="one float32 source", seen=seen, expected="bfloat16, or refused", holds=seen == "bfloat16")
