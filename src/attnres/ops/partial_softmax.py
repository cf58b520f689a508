"""A softmax over some of the sources, and its exact merge.

This is the numeric core of everything that splits a read: the two phases of Block AttnRes (paper, Algorithm 1),
sharded prefill, split kernels. A part is the pair (mix over its sources, log-sum-exp of their scores); two parts merge
into the part over the union of their sources, exactly.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnres.errors import ShapeError
from attnres.ops import reference
from attnres.ops.backends import Backend, resolve
from attnres.ops.library import call
from attnres.ops.precision import check_sources, result_dtype, working_dtype


class PartialSoftmax(NamedTuple):
    """Depth attention over a subset of the sources."""

    mixed: Tensor
    """Softmax-weighted mix of the subset, ``[*batch, dim]``, in the working dtype (float32 or float64)."""
    lse: Tensor
    """Log-sum-exp of the subset's scores, ``[*batch]``, in the working dtype."""

    def merge(self, other: "PartialSoftmax") -> "PartialSoftmax":
        """The partial softmax over both subsets: ``lse = log(e^lse_a + e^lse_b)``, mixes weighted ``e^(lse_x - lse)``.

        The weights are ``sigmoid(lse_a - lse_b)`` and its complement, which neither overflow nor cancel.
        """
        lse = torch.logaddexp(self.lse, other.lse)
        mine = torch.sigmoid(self.lse - other.lse)[..., None]
        theirs = torch.sigmoid(other.lse - self.lse)[..., None]
        return PartialSoftmax(self.mixed * mine + other.mixed * theirs, lse)


def partial_softmax(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> PartialSoftmax:
    """One read over a subset of its sources, ready to be merged with the rest.

    Args:
        sources: Tensors ``[*batch, dim]``, oldest first.
        pseudo_query: Learned vector of the site, ``[dim]``.
        key_weight: Scale of the key norm, ``[dim]``; None means ones.
        eps: Added to the mean square under the root of the key norm.
        backend: As of `depth_attention`.

    Raises:
        ShapeError: There is no source, or shapes disagree.
        BackendUnavailableError: The backend asked for by name cannot do this here.
    """
    weights = None if key_weight is None else key_weight[None]
    part = inter_block(sources, pseudo_query[None], weights, eps=eps, backend=backend)
    return PartialSoftmax(part.mixed[0], part.lse[0])


def inter_block(
    sources: Sequence[Tensor],
    pseudo_queries: Tensor,
    key_weights: Tensor | None = None,
    *,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> PartialSoftmax:
    """Phase 1: all reads of a block against the finished sources, in one pass over them.

    Possible because a pseudo-query does not depend on activations, so every read of the block is known before the block
    runs (paper, Algorithm 1, line 3). Each read folds its own key weight into its query; each source is read once.

    Args:
        sources: The finished sources ``[*batch, dim]``, oldest first.
        pseudo_queries: One per read of the block, ``[reads, dim]``.
        key_weights: One per read, ``[reads, dim]``; None means ones.
        eps: Added to the mean square under the root of the key norm.
        backend: As of `depth_attention`.

    Returns:
        A `PartialSoftmax` with ``mixed`` of shape ``[reads, *batch, dim]`` and ``lse`` of shape ``[reads, *batch]``.

    Raises:
        ShapeError: There is no source, or shapes disagree.
        BackendUnavailableError: The backend asked for by name cannot do this here.
    """
    check_sources(sources, pseudo_queries, key_weights)
    if pseudo_queries.dim() != 2 or (key_weights is not None and key_weights.shape != pseudo_queries.shape):
        seen = tuple(pseudo_queries.shape), None if key_weights is None else tuple(key_weights.shape)
        raise ShapeError(f"pseudo_queries and key_weights have shapes {seen[0]} and {seen[1]}; both are [reads, dim]")
    if resolve(backend, sources) != "reference":
        return PartialSoftmax(*call("inter_block", sources, pseudo_queries, key_weights, eps))
    work = working_dtype(sources)
    queries = reference.fold(pseudo_queries, key_weights, work)
    values = [source.to(work) for source in sources]
    scores = torch.stack([_block_scores(value, queries, eps) for value in values], dim=-1)
    return PartialSoftmax(reference.mix(values, scores.softmax(dim=-1)), scores.logsumexp(dim=-1))


def intra_block(
    finished: PartialSoftmax,
    partial: Tensor | None,
    pseudo_query: Tensor,
    key_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    out_scale: float = 1.0,
    out_norm_weight: Tensor | None = None,
    out_norm_eps: float | None = None,
    update: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Phase 2: merge one read's phase-1 result with the partial sum of the running block.

    Args:
        finished: Phase-1 result of this read: ``mixed`` ``[*batch, dim]``, ``lse`` ``[*batch]``.
        partial: Partial sum ``[*batch, dim]``; None at the first site of a block, where there is none yet. (A tensor
            of zeros would be wrong: it would take softmax mass.)
        pseudo_query: Learned vector of the site, ``[dim]``.
        key_weight: Scale of the key norm, ``[dim]``; None means ones.
        eps: Added to the mean square under the root of the key norm.
        out_scale: Factor on the mix.
        out_norm_weight: Weight ``[dim]`` of the RMSNorm that follows, which is then computed here as well.
        out_norm_eps: Eps of that norm; by default the same as ``eps``.
        update: An output ``[*batch, dim]`` still to be added to the partial sum. The sum, rounded to the partial sum's
            dtype, is what is read, and is returned beside the read. A kernel does all of it in one pass.
        dtype: Dtype of the result; by default that of the partial sum.
        backend: As of `depth_attention`.

    Returns:
        The read ``[*batch, dim]``, equal to `depth_attention` over the finished sources and the partial sum; with
        ``update`` the pair of the read and the new partial sum.

    Raises:
        ShapeError: The shapes disagree, or there is neither a partial sum nor a declared dtype, or an update without
            a partial sum.
        BackendUnavailableError: The backend asked for by name cannot do this here.
    """
    near = [] if partial is None else [partial]
    if partial is None and (dtype is None or update is not None):
        lacks = "a dtype of its own; declare the result's with dtype=" if dtype is None else "anything to update"
        raise ShapeError(f"a read without partial sum does not have {lacks}")
    if near:
        check_sources(near if update is None else [*near, update], pseudo_query, key_weight)
    _check_part(finished, near, pseudo_query, key_weight, out_norm_weight)
    out_dtype = result_dtype(near, dtype)
    norm_eps = eps if out_norm_eps is None else out_norm_eps
    if resolve(backend, [*near, finished.lse], out_dtype) != "reference":
        fused = None if out_norm_weight is None or torch.is_grad_enabled() else out_norm_weight
        settings = (eps, out_scale, norm_eps, out_dtype if out_norm_weight is fused else finished.lse.dtype)
        out, _, total = call("intra_block", *finished, near, update, pseudo_query, key_weight, fused, *settings)
        if out_norm_weight is not fused:
            out = reference.finish(out, out_norm_weight, 1.0, norm_eps, out_dtype)
        return out if update is None else (out, total)
    merged = finished
    if partial is not None:
        if update is not None:
            partial = (partial + update).to(partial.dtype)
        merged = finished.merge(partial_softmax([partial], pseudo_query, key_weight, eps=eps, backend="reference"))
    out = reference.finish(merged.mixed, out_norm_weight, out_scale, norm_eps, out_dtype)
    return out if update is None or partial is None else (out, partial)


def _check_part(
    finished: PartialSoftmax,
    near: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor | None,
    out_norm_weight: Tensor | None,
) -> None:
    shape = finished.mixed.shape
    expected = {"lse": (finished.lse, shape[:-1]), "pseudo_query": (pseudo_query, shape[-1:])}
    expected |= {"key_weight": (key_weight, shape[-1:]), "out_norm_weight": (out_norm_weight, shape[-1:])}
    expected |= {"partial": (near[0], shape)} if near else {}
    for name, (tensor, allowed) in expected.items():
        if tensor is not None and tensor.shape != allowed:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}; beside mixed {tuple(shape)} it is {tuple(allowed)}"
            )


def _block_scores(value: Tensor, queries: Tensor, eps: float) -> Tensor:
    """Scores of one source for all reads of a block, ``[reads, *batch]``."""
    return torch.stack([reference.depth_score(value, query, eps) for query in queries])
