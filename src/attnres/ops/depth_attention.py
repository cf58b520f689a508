"""Depth attention: one read of all sources at once, by whichever backend suits them."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from attnres.errors import ShapeError
from attnres.ops import reference
from attnres.ops.backends import Backend, in_reach, resolve
from attnres.ops.library import call
from attnres.ops.precision import check_sources, result_dtype


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
    out_norm_weight: Tensor | None = None,
    out_norm_eps: float | None = None,
    dtype: torch.dtype | None = None,
    return_weights: Literal[False] = False,
    return_lse: Literal[False] = False,
    backend: Backend = "auto",
) -> Tensor: ...
@overload
def depth_attention(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    out_scale: float = 1.0,
    out_norm_weight: Tensor | None = None,
    out_norm_eps: float | None = None,
    dtype: torch.dtype | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | DepthRead: ...
def depth_attention(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    out_scale: float = 1.0,
    out_norm_weight: Tensor | None = None,
    out_norm_eps: float | None = None,
    dtype: torch.dtype | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | DepthRead:
    """Mix the sources of each token with a softmax taken over depth.

    Source ``i`` scores ``s_i = <pseudo_query, rms_norm(v_i) * key_weight>``; the result is
    ``out_scale * sum_i softmax(s)_i * v_i`` (paper, Eq. 2-4). Only the keys are normalised: a loud source cannot win
    the score by being loud, but its content passes as it is. There is no ``1/sqrt(dim)``, no bias and no temperature.

    Scores, softmax and mix are float32 for every input dtype (float64 for float64 sources) and rounded once. A single
    source is returned bit for bit, and then query and key weight get gradients that are exactly zero. A kernel keeps
    references to the sources for the backward pass and nothing else of their size.

    Args:
        sources: Tensors ``[*batch, dim]``, oldest first; entry 0 is the token embedding.
        pseudo_query: Learned vector of one site, ``[dim]``. Zeros give the plain mean.
        key_weight: Scale of the key norm, ``[dim]``; None means ones.
        eps: Added to the mean square under the root of the key norm.
        out_scale: Factor on the mix; the number of sources turns the mean of a zero query into the sum.
        out_norm_weight: Weight ``[dim]`` of the RMSNorm that follows, which is then computed here as well; None means
            that no norm follows.
        out_norm_eps: Eps of that norm; by default the same as ``eps``.
        dtype: Dtype of the result. Needed only when the sources differ in dtype, as under autocast.
        return_weights: Also return the depth weights.
        return_lse: Also return the log-sum-exp of the scores.
        backend: ``"auto"`` takes the kernel of the sources' device where it can do them, else the reference, and logs
            which. ``"reference"``, ``"cpu"`` and ``"triton"`` take that one or raise. Kernels have first derivatives.

    Returns:
        The mix, ``[*batch, dim]``; a `DepthRead` when weights or log-sum-exp are asked for.

    Raises:
        ShapeError: There is no source, shapes disagree, or dtypes disagree and none is declared.
        BackendUnavailableError: The backend asked for by name cannot do this here.

    Examples:
        >>> embedding, output = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 4.0]])
        >>> depth_attention([embedding, output], torch.zeros(2))
        tensor([[1., 2.]])
    """
    if out_norm_weight is None and not (return_weights or return_lse) and in_reach(backend, sources):
        try:
            return torch.ops.attnres.read.default(sources, pseudo_query, key_weight, eps, out_scale, dtype)
        except RuntimeError:  # something does not fit; below it is said what, or done by the reference
            pass
    check_sources(sources, pseudo_query, key_weight)
    if pseudo_query.dim() != 1:
        raise ShapeError(f"pseudo_query has shape {tuple(pseudo_query.shape)}; a read takes one vector [dim]")
    for name, vector in (("key_weight", key_weight), ("out_norm_weight", out_norm_weight)):
        if vector is not None and vector.shape != pseudo_query.shape:
            raise ShapeError(f"{name} has shape {tuple(vector.shape)}; allowed: {tuple(pseudo_query.shape)}")
    out_dtype = result_dtype(sources, dtype)
    chosen = resolve(backend, sources, out_dtype)
    if len(sources) == 1 and not return_lse:  # nothing to compute: the source itself, not a copy of it
        chosen = "reference"
    settings = (eps, out_scale, eps if out_norm_eps is None else out_norm_eps, out_dtype)
    arguments = (sources, pseudo_query, key_weight, out_norm_weight, *settings)
    mixed, weights, lse = reference.read(*arguments) if chosen == "reference" else call("depth_attention", *arguments)
    if return_weights or return_lse:
        return DepthRead(mixed, weights if return_weights else None, lse if return_lse else None)
    return mixed
