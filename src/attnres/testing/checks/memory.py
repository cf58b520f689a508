"""Aliasing and strides: what is given stays as it is, and may lie in memory in any way."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attnres.testing.adapter import Adapter, NotApplicable
from attnres.testing.inputs import GRADIENT, VALUE, Inputs, leaf, random_inputs
from attnres.testing.outcome import Finding, error, same_bits
from attnres.testing.registry import check


@check("memory.inputs", "a read, and its backward, write to none of their inputs", "contract")
def inputs_unchanged(adapter: Adapter) -> Iterator[Finding]:
    """Every input before and after."""
    inputs = random_inputs(adapter, 3, 32, seed=70)
    given = inputs.leaves() if adapter.has_gradient else inputs
    before = [tensor.detach().clone() for tensor in (*given.sources, *given.vectors)]
    value = given.call(adapter)
    if adapter.has_gradient:
        upstream = torch.ones_like(value)
        torch.autograd.grad(value, [*given.sources, *given.vectors], upstream, allow_unused=True)
        yield same_bits("gradient of the result", upstream, torch.ones_like(value))
    for name, tensor, old in zip(_NAMES, (*given.sources, *given.vectors), before, strict=False):
        yield same_bits(name, tensor, old)


_NAMES = ("source 0", "source 1", "source 2", "query", "key weight")


@check("memory.result", "the result of several sources is memory of its own", "contract")
def result_is_new(adapter: Adapter) -> Iterator[Finding]:
    """Writing to the result does not reach a source."""
    inputs = random_inputs(adapter, 3, 32, seed=71)
    before = [source.clone() for source in inputs.sources]
    inputs.call(adapter).fill_(7.0)
    for at, old in enumerate(before):
        yield same_bits(f"source {at} after the result is written to", inputs.sources[at], old)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def _every_second(tensor: Tensor) -> Tensor:
    wide = torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=-1)
    return wide.flatten(-2)[..., ::2]


def _slice(tensor: Tensor) -> Tensor:
    beside = torch.full_like(tensor, torch.nan)
    return torch.cat([beside, tensor, beside], dim=-1)[..., tensor.shape[-1] : 2 * tensor.shape[-1]]


def _misaligned(tensor: Tensor) -> Tensor:
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed tokens": _transposed,
    "every second element": _every_second,
    "a slice of wider rows": _slice,
    "one element off": _misaligned,
}


@check("memory.strides", "sources may lie in memory in any way", "contract")
def strides(adapter: Adapter) -> Iterator[Finding]:
    """Transposed, strided, sliced and misaligned sources, with NaN in the gaps."""
    for name, layout in LAYOUTS.items():
        inputs = random_inputs(adapter, 3, 32, (3, 4), seed=72)
        laid = Inputs([layout(source) for source in inputs.sources], *_rest(inputs))
        yield error(name, laid.call(adapter), inputs.call(adapter).double(), VALUE[adapter.precise])


def _rest(inputs: Inputs) -> tuple[Tensor, Tensor | None, float]:
    return inputs.query, inputs.key_weight, inputs.eps


@check("memory.expanded", "a source may be one row expanded over all tokens", "contract")
def expanded(adapter: Adapter) -> Iterator[Finding]:
    """Strides of zero, as ``expand`` makes them."""
    inputs = random_inputs(adapter, 3, 32, (4,), seed=73)
    row = inputs.sources[0][:1].expand(4, 32)
    wide, full = (Inputs([one, *inputs.sources[1:]], *_rest(inputs)) for one in (row, row.clone()))
    yield error("source 0 expanded", wide.call(adapter), full.call(adapter).double(), VALUE[adapter.precise])


@check("memory.upstream", "the gradient of the result may lie in memory in any way", "contract")
def upstream(adapter: Adapter) -> Iterator[Finding]:
    """As ``sum()`` makes it: one number expanded; and transposed."""
    if not adapter.has_gradient:
        raise NotApplicable("declared: forward only")
    inputs = random_inputs(adapter, 2, 32, (3, 4), seed=74)
    value = inputs.call(adapter)
    layouts = {
        "one number expanded": value.new_ones(()).expand(value.shape),
        "transposed": _transposed(value.sin()),
    }
    for name, grad in layouts.items():
        found, plain = (
            _gradient(adapter, inputs, one) for one in (grad, grad.clone(memory_format=torch.contiguous_format))
        )
        yield error(name, found, plain.double(), GRADIENT[adapter.precise])


def _gradient(adapter: Adapter, inputs: Inputs, grad: Tensor) -> Tensor:
    leaves = inputs.leaves()
    return torch.autograd.grad(leaves.call(adapter), leaves.sources[:1], grad)[0]


@check("memory.same_tensor", "one tensor given as two sources counts twice, and gets both gradients")
def same_tensor(adapter: Adapter) -> Iterator[Finding]:
    """The first and the last source are the same object, against two tensors with the same numbers."""
    inputs = random_inputs(adapter, 2, 32, seed=75)
    first, second = inputs.sources
    apart, twice = (Inputs([first, second, last], *_rest(inputs)) for last in (first.clone(), first))
    yield error("value", twice.call(adapter), apart.call(adapter).double(), VALUE[adapter.precise])
    if not adapter.has_gradient:
        return
    separate, shared, ones = apart.leaves(), leaf(first), torch.ones_like(first)
    both = torch.autograd.grad(separate.call(adapter), [separate.sources[0], separate.sources[2]], ones)
    value = Inputs([shared, second, shared], *_rest(inputs)).call(adapter)
    (found,) = torch.autograd.grad(value, [shared], ones)
    yield error("gradient", found, (both[0] + both[1]).double(), GRADIENT[adapter.precise])
