"""Depth attention, the reference: one read of all sources at once.

This is the definition that everything else is held to. It keeps the sources in a list, folds query and key weight into
one vector, and never stacks or copies a source; a kernel is an optimisation of it with the same signature and result.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from attnres.errors import ShapeError
from attnres.ops.precision import check_sources, result_dtype, working_dtype


class DepthRead(NamedTuple):
    """One read with what was asked for beside it."""

    mixed: Tensor
    """The mix, shape ``[*batch, dim]``."""
    depth_weights: Tensor | None
    """Softmax values, oldest source first, shape ``[*batch, sources]``; None unless asked for."""
    lse: Tensor | None
    """Log-sum-exp of the scores, shape ``[*batch]``; None unless asked for."""


@overload
def depth_attention(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    out_scale: float = 1.0,
    dtype: torch.dtype | None = None,
    return_weights: Literal[False] = False,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def depth_attention(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    out_scale: float = 1.0,
    dtype: torch.dtype | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
) -> Tensor | DepthRead: ...
def depth_attention(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    out_scale: float = 1.0,
    dtype: torch.dtype | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
) -> Tensor | DepthRead:
    """Mix the sources of each token with a softmax taken over depth.

    Source ``i`` scores ``s_i = <pseudo_query, rms_norm(v_i) * key_weight>``; the result is
    ``out_scale * sum_i softmax(s)_i * v_i`` (paper, Eq. 2-4). Only the keys are normalised: a loud source cannot win
    the score by being loud, but its content passes as it is. There is no ``1/sqrt(dim)``, no bias and no temperature.

    Scores, softmax and mix are float32 for every input dtype (float64 for float64 sources) and rounded once. A single
    source is returned bit for bit, and then query and key weight get gradients that are exactly zero.

    Args:
        sources: Tensors ``[*batch, dim]``, oldest first; entry 0 is the token embedding.
        pseudo_query: Learned vector of one site, ``[dim]``. Zeros give the plain mean.
        key_weight: Scale of the key norm, ``[dim]``; None means ones.
        eps: Added to the mean square under the root of the key norm.
        out_scale: Factor on the mix; the number of sources turns the mean of a zero query into the sum.
        dtype: Dtype of the result. Needed only when the sources differ in dtype, as under autocast.
        return_weights: Also return the depth weights.
        return_lse: Also return the log-sum-exp of the scores.

    Returns:
        The mix, ``[*batch, dim]``; a `DepthRead` when weights or log-sum-exp are asked for.

    Raises:
        ShapeError: There is no source, shapes disagree, or dtypes disagree and none is declared.

    Examples:
        >>> embedding, output = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 4.0]])
        >>> depth_attention([embedding, output], torch.zeros(2))
        tensor([[1., 2.]])
    """
    check_sources(sources, pseudo_query, key_weight)
    if pseudo_query.dim() != 1:
        raise ShapeError(f"pseudo_query has shape {tuple(pseudo_query.shape)}; a read takes one vector [dim]")
    out_dtype = result_dtype(sources, dtype)
    values = [source.to(working_dtype(sources)) for source in sources]
    query = fold(pseudo_query, key_weight, values[0].dtype)
    if len(sources) == 1:
        mixed = _only_source(values[0], pseudo_query, key_weight)
        weights = torch.ones_like(mixed[..., :1]) if return_weights else None
        lse = depth_score(values[0], query, eps) if return_lse else None
    else:
        scores = torch.stack([depth_score(value, query, eps) for value in values], dim=-1)
        weights = scores.softmax(dim=-1)
        mixed = mix(values, weights)
        lse = scores.logsumexp(dim=-1) if return_lse else None
    mixed = (mixed if out_scale == 1.0 else mixed * out_scale).to(out_dtype)
    if return_weights or return_lse:
        return DepthRead(mixed, weights if return_weights else None, lse)
    return mixed


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


def _only_source(source: Tensor, pseudo_query: Tensor, key_weight: Tensor | None) -> Tensor:
    vectors = (pseudo_query,) if key_weight is None else (pseudo_query, key_weight)
    return _OnlySource.apply(source, *vectors)
