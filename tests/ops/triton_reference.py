"""What the Triton operators must return, in float64 and by autograd of the reference."""

import torch
from torch import Tensor

from attnres.ops import PartialSoftmax, depth_attention, inter_block, partial_softmax


def leaf(tensor: Tensor | None) -> Tensor | None:
    """A float64 copy that collects a gradient."""
    return None if tensor is None else tensor.detach().double().clone().requires_grad_()


def norm(rows: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The norm that may follow a read."""
    return rows if weight is None else rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight


def gradients(outputs, upstream, inputs) -> list[Tensor | None]:
    """Gradients of the inputs, with zeros for what an output does not depend on, and None for absent inputs."""
    pairs = [(output, grad.double()) for output, grad in zip(outputs, upstream, strict=True) if grad is not None]
    present = [tensor for tensor in inputs if tensor is not None]
    loss = sum((output * grad).sum() for output, grad in pairs) + 0.0 * sum(tensor.sum() for tensor in present)
    found = iter(torch.autograd.grad(loss, present))
    return [None if tensor is None else next(found) for tensor in inputs]


def read(sources, query, key, weight, eps, scale, norm_eps):
    """Mix, depth weights and lse."""
    part = depth_attention(
        sources, query, key, eps=eps, out_scale=scale, return_weights=True, return_lse=True, backend="reference"
    )
    return norm(part.mixed, weight, norm_eps), part.depth_weights, part.lse


def phase_one(sources, queries, keys, eps):
    """Mixes and lses of all reads."""
    part = inter_block(sources, queries, keys, eps=eps, backend="reference")
    return part.mixed, part.lse


def phase_two(mixed, lse, near, query, key, eps, scale):
    """The read before its norm, and the weights of the near sources."""
    part, scores = PartialSoftmax(mixed, lse), []
    for value in near:
        alone = partial_softmax([value], query, key, eps=eps, backend="reference")
        part, scores = part.merge(alone), [*scores, alone.lse]
    weights = [torch.exp(score - part.lse) for score in scores]
    return part.mixed * scale, torch.stack(weights, -1) if weights else lse.new_zeros(*lse.shape, 0)
