"""The golden vectors, run on the implementation: the same files that other languages use."""

from collections.abc import Iterator

import torch

from attnres.testing.adapter import Adapter, NotApplicable
from attnres.testing.golden import ReadCase, load
from attnres.testing.inputs import GRADIENT, HALF, VALUE, leaf
from attnres.testing.outcome import Finding, each, error
from attnres.testing.registry import check


@check("golden.reads", "the golden reads have the stored value and gradients")
def reads(adapter: Adapter) -> Iterator[Finding]:
    """Those of the adapter's definition."""
    cases = [case for case in load().reads if case.definition == adapter.definition.name]
    for case in cases:
        yield from each(_read(adapter, case))


def _read(adapter: Adapter, case: ReadCase) -> Iterator[Finding]:
    dtype, device = adapter.precise, adapter.device
    adapter.check_limits(len(case.sources), case.query.shape[-1], dtype)
    _refuse(adapter, case.eps)
    query, weight, gradients = _vectors(adapter, case)
    vectors = [leaf(vector.to(device, adapter.vector_dtype(dtype))) for vector in (query, weight) if vector is not None]
    leaves = [leaf(source.to(device, dtype)) for source in case.sources]
    value = adapter.read(leaves, vectors[0], vectors[1] if weight is not None else None, eps=case.eps)
    yield error(case.name, value, case.value.to(device), VALUE[dtype])
    if adapter.has_gradient:
        upstream = case.upstream.to(device, value.dtype)
        found = torch.autograd.grad(value, [*leaves, *vectors], upstream, allow_unused=True)
        for at, (one, right) in enumerate(zip(found, [*case.grad_sources, *gradients], strict=False)):
            name = f"source {at}" if at < len(leaves) else ("query", "key weight")[at - len(leaves)]
            if right.any() or (one is not None and one.any()):
                # where one source has all the weight, or each key is a sign, a gradient is what cancellation leaves
                size = max(1.0, (case.upstream.abs().max() / right.abs().max().clamp_min(1e-12)).item())
                yield error(f"{case.name}, gradient of {name}", one, right.to(device), GRADIENT[dtype] * size)


def _refuse(adapter: Adapter, eps: float) -> None:
    if adapter.precise in HALF:
        raise NotApplicable("declared: 16 bits, which do not hold the golden inputs")
    if adapter.fixed_eps not in (None, eps):
        raise NotApplicable(f"declared: eps is {adapter.fixed_eps}")


def _vectors(adapter: Adapter, case: ReadCase) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
    """Query and key weight, and their gradients; without a key weight of its own, the two in one and no gradient."""
    if case.key_weight is None or case.grad_key_weight is None:
        return case.query, None, [case.grad_query]
    if not adapter.has_key_weight:
        return case.query * case.key_weight, None, []
    return case.query, case.key_weight, [case.grad_query, case.grad_key_weight]


@check("golden.schedule", "the golden schedules have the stored reads")
def schedule(adapter: Adapter) -> Iterator[Finding]:
    """Models with linear sublayers, each site with its own query and key weight."""
    for case in load().schedules:
        if case.definition == adapter.definition.name:
            yield from each(_schedule(adapter, case.name))


def _schedule(adapter: Adapter, name: str) -> Iterator[Finding]:
    from attnres.testing.stack import Stack

    case = next(case for case in load().schedules if case.name == name)
    _refuse(adapter, case.eps)
    count, dim = case.matrices.shape[0], case.matrices.shape[-1]
    stack = Stack(adapter, count, case.sublayers_per_block, dim)
    stack.model = adapter.model(count, case.sublayers_per_block, dim, eps=case.eps, dtype=stack.dtype)
    for site in range(len(stack.model.queries)):
        factor = 1.0 if adapter.has_key_weight else case.key_weights[site]
        stack.fill("queries", site, (case.queries[site] * factor).to(adapter.device))
    for site in range(len(stack.model.key_weights)):
        stack.fill("key_weights", site, case.key_weights[site].to(adapter.device))
    matrices = case.matrices.to(adapter.device)
    trace = stack.run(
        case.embedding.to(adapter.device, stack.dtype).clone(),
        [lambda read, m=matrix: read @ m.to(read.dtype).T for matrix in matrices],
    )
    for site, (read, right) in enumerate(zip(trace.all_reads, case.reads, strict=True)):
        yield error(f"{name}, read {site}", read, right.to(adapter.device), 10 * VALUE[adapter.precise])
