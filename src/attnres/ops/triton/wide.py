"""The operators for rows that are too wide for registers, out of the kernels of `tiles` and plain tensor operations.

Sources are read twice or three times, and a mix passes through memory in the working dtype. That is the price of widths
above `launch.MAX_WIDTH`; nothing here is a limit on them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnres.ops.precision import working_dtype
from attnres.ops.reference import finish
from attnres.ops.triton import launch, reduction, tiles
from attnres.ops.triton.rows import Rows, rows_of


def depth_attention(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    eps: float,
    out_scale: float,
    out_norm_eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """One read, as `read.depth_attention`."""
    work, shape = working_dtype(sources), sources[0].shape
    rows = rows_of(sources)
    scores, _, _ = tiles.statistics(rows, tiles.fold(pseudo_query, key_weight, work)[None], eps)
    weights = _weights(scores)
    mixed = finish(_mix(sources, rows, weights), out_norm_weight, out_scale, out_norm_eps, dtype)
    batch, lse = shape[:-1], scores.logsumexp(dim=-1)
    return mixed.view(shape), weights.view(*batch, len(sources)), lse.view(batch)


def depth_attention_backward(
    grad_mixed: Tensor | None,
    grad_weights: Tensor | None,
    grad_lse: Tensor | None,
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    eps: float,
    out_scale: float,
    out_norm_eps: float,
    needs: Sequence[bool],
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Gradients of one read, as `read_backward.depth_attention_backward`."""
    work, rows = working_dtype(sources), rows_of(sources)
    queries = tiles.fold(pseudo_query, key_weight, work)[None]
    wanted = torch.zeros(rows.tokens, rows.width, dtype=work, device=rows.some.device)
    if grad_mixed is not None:
        wanted = grad_mixed.reshape(rows.tokens, rows.width).to(work)
    grad_norm = launch.absent(pseudo_query)
    if out_norm_weight is not None:
        scores, _, _ = tiles.statistics(rows, queries, eps)
        mixed = _mix(sources, rows, _weights(scores)) * out_scale
        wanted, share = _through_norm(wanted, mixed, out_norm_weight.to(work), out_norm_eps)
        grad_norm = share.sum(dim=0).to(out_norm_weight.dtype)
    upstream = rows_of([(wanted * out_scale).contiguous()])
    scores, inverses, slopes = tiles.statistics(rows, queries, eps, upstream)
    weights = _weights(scores)
    by_score = _through_softmax(weights, slopes, grad_weights, grad_lse)
    if rows.count == 1 and grad_lse is None:
        scores = torch.zeros_like(scores)
        inverses = torch.zeros_like(inverses)
    grads = [
        launch.empty(source.shape, source.dtype, source) if needed else None
        for source, needed in zip(sources, needs, strict=True)
    ]
    grad_rows = rows_of(grads) if any(needs) else None
    grad_query, grad_key = _spread(
        rows, grad_rows, queries, upstream, weights, by_score, scores, inverses, pseudo_query, key_weight
    )
    present = [launch.absent(source) if grad is None else grad for source, grad in zip(sources, grads, strict=True)]
    return present, grad_query, grad_key, grad_norm


def inter_block(
    sources: Sequence[Tensor], pseudo_queries: Tensor, key_weights: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Phase 1, as `inter_block.inter_block`."""
    rows, shape = rows_of(sources), (pseudo_queries.shape[0], *sources[0].shape)
    queries = tiles.fold(pseudo_queries, key_weights, working_dtype(sources))
    scores, _, _ = tiles.statistics(rows, queries, eps)
    mixed = tiles.gather(rows, scores.softmax(dim=-1), rows.tokens).transpose(0, 1).contiguous()
    return mixed.view(shape), scores.logsumexp(dim=-1).t().contiguous().view(shape[:-1])


def intra_block(
    mixed: Tensor,
    lse: Tensor,
    near: Sequence[Tensor],
    update: Tensor | None,
    pseudo_query: Tensor,
    key_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    eps: float,
    out_scale: float,
    out_norm_eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Phase 2, as `intra_block.intra_block`."""
    work, width, partial = lse.dtype, mixed.shape[-1], launch.absent(mixed)
    if update is not None:
        partial = (near[-1].to(work) + update.to(work)).to(near[-1].dtype).contiguous()
        near = [*near[:-1], partial]
    merged, part = mixed.reshape(-1, width).to(work), lse.reshape(-1, 1)
    weights = part.new_empty(part.shape[0], 0)
    if near:
        rows = rows_of(near)
        scores, _, _ = tiles.statistics(rows, tiles.fold(pseudo_query, key_weight, work)[None], eps)
        shares = torch.cat([part, scores[:, 0]], dim=-1).softmax(dim=-1)
        weights = shares[:, 1:].contiguous()
        merged = merged * shares[:, :1] + tiles.gather(rows, weights[:, None], rows.tokens)[:, 0]
    merged = finish(merged, out_norm_weight, out_scale, out_norm_eps, dtype)
    return merged.view(mixed.shape).clone(), weights.view(*lse.shape, len(near)), partial


def intra_block_backward(
    grad: Tensor,
    out: Tensor,
    near: Sequence[Tensor],
    near_weights: Tensor,
    pseudo_query: Tensor,
    key_weight: Tensor | None,
    eps: float,
    out_scale: float,
    mixed_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, list[Tensor], Tensor, Tensor]:
    """Gradients of phase 2, as `intra_block_backward.intra_block_backward`."""
    work, batch, width = near_weights.dtype, grad.shape[:-1], grad.shape[-1]
    queries = tiles.fold(pseudo_query, key_weight, work)[None]
    wanted = (grad.reshape(-1, width).to(work) * out_scale).contiguous()
    weights = near_weights.reshape(wanted.shape[0], 1, len(near))
    grad_mixed = (wanted * (1.0 - weights.sum(dim=-1))).to(mixed_dtype).view(grad.shape)
    if not near:
        nothing = reduction.unfolded(wanted.new_empty(0, width), pseudo_query, key_weight)
        return grad_mixed, wanted.new_zeros(batch), [], *nothing
    rows, upstream = rows_of(near), rows_of([wanted])
    scores, inverses, slopes = tiles.statistics(rows, queries, eps, upstream)
    assert slopes is not None
    level = (grad.to(work) * out.to(work)).sum(dim=-1).view(-1, 1, 1)
    by_score = weights * (slopes - level)
    grads = [launch.empty(source.shape, source.dtype, source) for source in near]
    vectors = _spread(
        rows, rows_of(grads), queries, upstream, weights, by_score, scores, inverses, pseudo_query, key_weight
    )
    return grad_mixed, -by_score.sum(dim=(1, 2)).view(batch), grads, *vectors


def _weights(scores: Tensor) -> Tensor:
    return torch.ones_like(scores) if scores.shape[-1] == 1 else scores.softmax(dim=-1)


def _mix(sources: Sequence[Tensor], rows: Rows, weights: Tensor) -> Tensor:
    if len(sources) == 1:
        return sources[0].reshape(rows.tokens, rows.width).to(weights.dtype)
    return tiles.gather(rows, weights, rows.tokens)[:, 0]


def _inverse_rms(rows: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + eps)


def _through_norm(upstream: Tensor, mixed: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    inverse, weighted = _inverse_rms(mixed, eps), upstream * weight
    along = (weighted * mixed).mean(dim=-1, keepdim=True) * inverse**3
    return weighted * inverse - mixed * along, upstream * mixed * inverse


def _through_softmax(
    weights: Tensor, slopes: Tensor | None, grad_weights: Tensor | None, grad_lse: Tensor | None
) -> Tensor:
    slopes = torch.zeros_like(weights) if slopes is None else slopes
    if grad_weights is not None:
        slopes = slopes + grad_weights.reshape(weights.shape).to(weights.dtype)
    by_score = weights * (slopes - (weights * slopes).sum(dim=-1, keepdim=True))
    if weights.shape[-1] == 1:
        by_score = torch.zeros_like(by_score)
    return by_score if grad_lse is None else by_score + weights * grad_lse.reshape(-1, 1, 1).to(weights.dtype)


def _spread(
    rows: Rows,
    grad_rows: Rows | None,
    queries: Tensor,
    upstream: Rows,
    by_grad: Tensor,
    by_score: Tensor,
    scores: Tensor,
    inverses: Tensor,
    pseudo_query: Tensor,
    key_weight: Tensor | None,
) -> tuple[Tensor, Tensor]:
    by_query = by_score * inverses[:, None, :]
    by_value = -(by_score * scores)[:, 0] * inverses.square() / rows.width
    if grad_rows is not None and rows.tokens:
        tiles.combine(rows, grad_rows, queries, upstream, by_grad, by_query, by_value)
    partials = tiles.gather(rows, by_query, tiles.groups_of(rows))[:, 0]
    return reduction.unfolded(partials, pseudo_query, key_weight)
