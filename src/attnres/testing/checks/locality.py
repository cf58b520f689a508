"""Row locality: nothing of a read crosses tokens, so chunks, packing and a NaN elsewhere change nothing."""

from collections.abc import Iterator

import torch

from attnres.testing.adapter import Adapter, NotApplicable
from attnres.testing.checks.gradient import found_and_exact
from attnres.testing.inputs import VALUE, Inputs, normals, random_inputs
from attnres.testing.outcome import Finding, error, same_bits
from attnres.testing.registry import check

TOKENS, BAD = 9, 4


@check("locality.nan", "a NaN or an infinity in one token stays there")
def not_a_number(adapter: Adapter) -> Iterator[Finding]:
    """The other tokens are what they are without it."""
    for name, poison in (("NaN", torch.nan), ("infinity", torch.inf)):
        inputs = random_inputs(adapter, 3, 32, (TOKENS,), seed=80)
        without = inputs.call(adapter).double()
        inputs.sources[1][BAD, 3] = poison
        value = inputs.call(adapter)
        yield error(f"{name} in one token, the others", _others(value), _others(without), VALUE[adapter.precise])


@check("locality.nan_gradient", "backward, a NaN in one token leaves the gradients of the other tokens' sources finite")
def not_a_number_backward(adapter: Adapter) -> Iterator[Finding]:
    """The gradients of query and key weight are sums over tokens, and may be NaN."""
    inputs = random_inputs(adapter, 3, 32, (TOKENS,), seed=81)
    inputs.sources[1][BAD, 3] = torch.nan
    found, _ = found_and_exact(adapter, inputs)
    for at, gradient in enumerate(found[:3]):
        if gradient is None:
            raise NotApplicable("no gradient")
        wrong = int((~_others(gradient).isfinite()).sum())
        where = f"source {at}, elements of other tokens that are not finite"
        yield Finding(where=where, seen=wrong, expected=0, holds=wrong == 0)


def _others(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows[:BAD], rows[BAD + 1 :]])


@check("locality.chunks", "a token's result does not depend on which tokens it is computed with")
def chunks(adapter: Adapter) -> Iterator[Finding]:
    """All tokens at once, and in chunks of 1, 7 and 16, to rounding."""
    for name, whole, parts in _chunked(adapter):
        yield error(name, parts, whole.double(), VALUE[adapter.precise])


@check("locality.chunk_bits", "the same bit for bit", "contract")
def chunk_bits(adapter: Adapter) -> Iterator[Finding]:
    """Chunked prefill and prefix caches then give the same text."""
    for name, whole, parts in _chunked(adapter):
        yield same_bits(name, parts, whole)


def _chunked(adapter: Adapter) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    inputs = random_inputs(adapter, 5, 64, (40,), seed=82)
    whole = inputs.call(adapter)
    for size in (1, 7, 16):
        parts = [
            Inputs([source[at : at + size] for source in inputs.sources], inputs.query, inputs.key_weight, inputs.eps)
            for at in range(0, 40, size)
        ]
        yield f"chunks of {size}", whole, torch.cat([part.call(adapter) for part in parts])


@check("locality.model", "in a whole model with sublayers that are local to a token, a NaN in one token stays there")
def model(adapter: Adapter) -> Iterator[Finding]:
    """Four sublayers, two per block."""
    made = adapter.model(4, 2, 8, eps=adapter.fixed_eps or 1e-5, dtype=adapter.precise)
    embedding = normals(83, adapter.device)(1, TOKENS, 8).to(adapter.precise)
    embedding[0, BAD, 2] = torch.nan
    value = made.run(embedding, [torch.tanh] * 4)[0]
    wrong = int((~_others(value).isfinite()).sum())
    yield Finding(where="elements of other tokens that are not finite", seen=wrong, expected=0, holds=wrong == 0)
