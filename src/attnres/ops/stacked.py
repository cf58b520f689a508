"""Scores and mixes of stacked sources, in plain PyTorch: what variants of depth attention are made of.

Depth attention itself has kernels that never stack its sources (`attnres.ops.depth_attention`). A variant whose query
depends on the token, whose weights differ between channels, or whose values are normalised, is written with these.
Everything is computed in float32 (float64 for float64 sources) whatever autocast says; who calls rounds once, at the
end.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnres.ops.precision import without_autocast, working_dtype


def stack(sources: Sequence[Tensor]) -> Tensor:
    """The sources one beside the other in the working dtype: ``[*batch, sources, dim]``, oldest first."""
    dtype = working_dtype(sources)
    return torch.stack([source.to(dtype) for source in sources], dim=-2)


def inverse_rms(stacked: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(v^2) + eps)`` of each source: ``[*batch, sources]``."""
    norm = torch.linalg.vector_norm(stacked, dim=-1)
    return torch.rsqrt(norm.square() / stacked.shape[-1] + eps)


def dot(stacked: Tensor, query: Tensor) -> Tensor:
    """``<query, v_i>`` of each source: ``[*batch, sources]``. One query ``[dim]``, or one a token ``[*batch, dim]``."""
    query = query.to(stacked.dtype)
    with without_autocast(stacked):
        if query.dim() == 1:
            return stacked @ query
        return (stacked @ query[..., None]).squeeze(-1)


def scores(stacked: Tensor, query: Tensor, eps: float | None) -> Tensor:
    """``<query, rms_norm(v_i)>`` of each source, ``[*batch, sources]``; without the norm if ``eps`` is None."""
    raw = dot(stacked, query)
    return raw if eps is None else raw * inverse_rms(stacked, eps)


def mix(stacked: Tensor, weights: Tensor) -> Tensor:
    """``sum_i weights_i * v_i`` for one or several views.

    Args:
        stacked: ``[*batch, sources, dim]``.
        weights: ``[*batch, views, sources, channels]``; ``channels`` divides ``dim``, and leading axes broadcast.

    Returns:
        ``[*batch, dim]`` for one view, else ``[*batch, views, dim]``.
    """
    weights = weights.to(stacked.dtype)
    channels, dim = weights.shape[-1], stacked.shape[-1]
    if channels == 1:
        rows = weights[..., 0].expand(
            *stacked.shape[:-2], -1, -1
        )  # one path of matmul, whether gradients are wanted or not
        with without_autocast(stacked):
            mixed = rows @ stacked
    elif channels == dim:
        mixed = (weights * stacked[..., None, :, :]).sum(-2)
    else:
        grouped = stacked.unflatten(-1, (channels, dim // channels))
        mixed = (weights[..., None] * grouped[..., None, :, :, :]).sum(-3).flatten(-2)
    return mixed.squeeze(-2) if weights.shape[-3] == 1 else mixed
