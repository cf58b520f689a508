"""The reference: depth attention in a few lines of PyTorch, differentiable as often as one likes.

This is the definition that everything else is held to. It keeps the sources in a list, folds query and key weight into
one vector, and never stacks or copies a source; a kernel is an optimisation of it with the same result.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnres.ops.precision import working_dtype


def read(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    eps: float,
    out_scale: float,
    out_norm_eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """One read: the mix ``[*batch, dim]`` in ``dtype``, depth weights ``[*batch, sources]`` and log-sum-exp."""
    values = [source.to(working_dtype(sources)) for source in sources]
    query = fold(pseudo_query, key_weight, values[0].dtype)
    if len(values) == 1:
        mixed = only_source(values[0], pseudo_query, key_weight)
        weights = torch.ones_like(mixed[..., :1])
        lse = depth_score(values[0], query, eps)
    else:
        scores = torch.stack([depth_score(value, query, eps) for value in values], dim=-1)
        weights, lse = scores.softmax(dim=-1), scores.logsumexp(dim=-1)
        mixed = mix(values, weights)
    return finish(mixed, out_norm_weight, out_scale, out_norm_eps, dtype), weights, lse


def finish(
    mixed: Tensor, out_norm_weight: Tensor | None, out_scale: float, out_norm_eps: float, dtype: torch.dtype
) -> Tensor:
    """What comes after the mix: the read's scale, its one rounding, and the norm that follows if it is given.

    That norm is no part of the read. It is rounded as when it follows in an operator of its own, so that fusing it
    changes nothing but the order of sums.
    """
    if out_scale != 1.0:
        mixed = mixed * out_scale
    mixed = mixed.to(dtype)
    return mixed if out_norm_weight is None else rms_norm(mixed, out_norm_weight, out_norm_eps).to(dtype)


def rms_norm(read: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMSNorm of Llama and its relatives, rounded where Transformers rounds it.

    The mean square is taken in float32 (float64 for float64), the normalised value is rounded to the dtype of ``read``,
    and only then multiplied by the weight.
    """
    value = read.to(working_dtype([read]))
    value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)
    return weight * value.to(read.dtype)


def fold(pseudo_query: Tensor, key_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The vector that a normalised source is scored with: ``pseudo_query * key_weight`` in the working dtype."""
    query = pseudo_query.to(dtype)
    return query if key_weight is None else query * key_weight.to(dtype)


def depth_score(value: Tensor, query: Tensor, eps: float) -> Tensor:
    """Score one source: ``<query, value> / sqrt(mean(value^2) + eps)``, shape ``[*batch]``.

    A sum of products and not a matrix product: each row's result is then bitwise independent of the other rows (chunked
    and sharded prefill rely on it), and autocast leaves it in float32.
    """
    inverse_rms = torch.rsqrt(value.square().mean(dim=-1) + eps)
    return (value * query).sum(dim=-1) * inverse_rms


def mix(values: Sequence[Tensor], weights: Tensor) -> Tensor:
    """``sum_i weights[..., i] * values[i]``, adding oldest first."""
    total = weights[..., 0, None] * values[0]
    for index in range(1, len(values)):
        total = total + weights[..., index, None] * values[index]
    return total


class _OnlySource(torch.autograd.Function):
    """Identity in the source, with zero (not missing) gradients for query and key weight.

    A missing gradient would look like an unused parameter to DistributedDataParallel; and going through the softmax
    would multiply a huge but finite source by 0/0 once its score overflows.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(source: Tensor, *vectors: Tensor) -> Tensor:
        return source.view_as(source)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*grads, *(torch.zeros_like(vector) for vector in ctx.saved_tensors))


def only_source(source: Tensor, pseudo_query: Tensor, key_weight: Tensor | None) -> Tensor:
    """The source itself, with zero gradients for query and key weight."""
    if not torch.is_grad_enabled():
        return source.view_as(source)
    vectors = (pseudo_query,) if key_weight is None else (pseudo_query, key_weight)
    return _OnlySource.apply(source, *vectors)
