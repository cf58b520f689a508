"""The same inputs give the same bits."""

from collections.abc import Iterator

import torch

from attnres.testing.adapter import Adapter, NotApplicable
from attnres.testing.inputs import normals, random_inputs
from attnres.testing.outcome import Finding, same_bits
from attnres.testing.registry import check

REPEATS = 3


@check("determinism.value", "the same read twice has the same bits", "contract")
def value(adapter: Adapter) -> Iterator[Finding]:
    """Enough tokens for several threads or programs."""
    _refuse_interpreter(adapter)
    inputs = random_inputs(adapter, 5, 64, (300,), seed=60)
    first = inputs.call(adapter)
    for _ in range(REPEATS):
        yield same_bits("again", inputs.call(adapter), first)


@check("determinism.gradient", "the same backward twice has the same bits: no atomic adds", "contract")
def gradient(adapter: Adapter) -> Iterator[Finding]:
    """All gradients; those of query and key weight are sums over all tokens."""
    _refuse_interpreter(adapter)
    if not adapter.has_gradient:
        raise NotApplicable("declared: forward only")
    first = _gradients(adapter)
    for _ in range(REPEATS):
        names = [*(f"source {at}" for at in range(5)), "query", "key weight"]
        for name, one, again in zip(names, first, _gradients(adapter), strict=False):
            yield same_bits(f"gradient of {name}", again, one)


def _gradients(adapter: Adapter) -> tuple[torch.Tensor, ...]:
    leaves = random_inputs(adapter, 5, 64, (300,), seed=60).leaves()
    result = leaves.call(adapter)
    upstream = normals(61, adapter.device)(*result.shape).to(result.dtype)
    return torch.autograd.grad(result, [*leaves.sources, *leaves.vectors], upstream, materialize_grads=True)


def _refuse_interpreter(adapter: Adapter) -> None:
    if adapter.is_interpreted:
        raise NotApplicable("runs in an interpreter, one program after the other; needs a GPU")
