"""The norm of all gradients of a model whose parameters lie on several ranks, and their scaling by it.

Each number of the model counts once: shards are added up over the ranks that share them, stages over the pipeline, and
what several ranks have whole is counted by one of them.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard


def clip_gradients(
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    bound: float,
    device: torch.device | str,
    shards: Iterable[dist.ProcessGroup] = (),
    stages: dist.ProcessGroup | None = None,
    counted_elsewhere: frozenset[str] = frozenset(),
) -> Tensor:
    """Scale all gradients so that their norm over the whole model is at most a bound.

    Args:
        parameters: Those of this rank, with their names; a name that comes twice counts once.
        bound: Largest norm; infinity scales nothing.
        device: Of the gradients.
        shards: Groups whose ranks have different parts of the same tensors; all of them call this together.
        stages: Ranks that have other layers, likewise.
        counted_elsewhere: Names that another stage has as well, and counts.

    Returns:
        The norm before, float64, the same on every rank.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # of shards, and of whole gradients
    local: list[Tensor] = []
    counted = set(counted_elsewhere)
    for name, parameter in parameters:
        if parameter.grad is None:
            continue
        own = local_part(parameter.grad)
        local.append(own)
        if name not in counted and own.numel():
            sums[0 if is_divided(parameter.grad) else 1] += torch.linalg.vector_norm(own).double().square()
        counted.add(name)
    for group in shards:
        dist.all_reduce(sums[:1], group=group)
    if stages is not None:
        dist.all_reduce(sums, group=stages)
    norm = sums.sum().sqrt()
    if math.isfinite(bound):
        factor = torch.clamp(bound / (norm + 1e-6), max=1.0)
        for gradient in local:
            gradient.mul_(factor.to(gradient.dtype))
    return norm


def is_divided(tensor: Tensor) -> bool:
    """Whether ranks have different parts of a tensor."""
    return isinstance(tensor, DTensor) and any(isinstance(placement, Shard) for placement in tensor.placements)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
