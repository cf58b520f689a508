"""Depth attention: one read of all sources at once, by whichever backend suits them."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from attnres.errors import ConfigError, ShapeError
from attnres.ops import reference
from attnres.ops.backends import Backend, in_reach, resolve
from attnres.ops.library import READ, READ_UPDATED, call, wants_grad
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
    out_norm_weight: Tensor | None = None,
    out_norm_eps: float | None = None,
    update: None = None,
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
    update: None = None,
    dtype: torch.dtype | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | DepthRead: ...
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
    update: Tensor,
    dtype: torch.dtype | None = None,
    return_weights: Literal[False] = False,
    return_lse: Literal[False] = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]: ...
def depth_attention(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    out_scale: float = 1.0,
    out_norm_weight: Tensor | None = None,
    out_norm_eps: float | None = None,
    update: Tensor | None = None,
    dtype: torch.dtype | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | DepthRead | tuple[Tensor, Tensor]:
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
        out_norm_weight: Weight ``[dim]`` of the RMSNorm that follows, which is then computed here as well, on the
            rounded read and rounded as Transformers' Llama does it; None means that no norm follows.
        out_norm_eps: Eps of that norm; by default the same as ``eps``.
        update: An output ``[*batch, dim]`` still to be added to the last source. The sum, rounded to that source's
            dtype, is what is read, and is returned beside the read.
        dtype: Dtype of the result. Needed only when the sources differ in dtype, as under autocast.
        return_weights: Also return the depth weights.
        return_lse: Also return the log-sum-exp of the scores.
        backend: ``"auto"`` takes the kernel of the sources' device where it can do them, else the reference, and logs
            which. ``"reference"``, ``"cpu"`` and ``"triton"`` take that one or raise. Kernels have first derivatives.

    Returns:
        The mix, ``[*batch, dim]``; a `DepthRead` when weights or log-sum-exp are asked for; with ``update`` the pair of
        the mix and the updated last source.

    Raises:
        ShapeError: There is no source, shapes disagree, or dtypes disagree and none is declared.
        ConfigError: Weights or log-sum-exp are asked for together with an update.
        BackendUnavailableError: The backend asked for by name cannot do this here.

    Examples:
        >>> embedding, output = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 4.0]])
        >>> depth_attention([embedding, output], torch.zeros(2))
        tensor([[1., 2.]])
    """
    norm_eps = eps if out_norm_eps is None else out_norm_eps
    count = len(sources)
    mix_alone = not (return_weights or return_lse) and (count > 1 or (count == 1 and out_norm_weight is not None))
    vectors = (pseudo_query, key_weight, out_norm_weight)
    if mix_alone and in_reach(backend, sources):
        try:
            return _read(sources, update, *vectors, eps, out_scale, norm_eps, dtype)
        except RuntimeError:  # something does not fit; below it is said what, or done by the reference
            pass
    if update is not None and (return_weights or return_lse):
        raise ConfigError("update is given together with return_weights or return_lse; allowed is one or the other")
    check_sources(sources, pseudo_query, key_weight)
    _check_vectors(*vectors)
    given = sources if update is None else [*sources, update]
    if given[-1].shape != sources[0].shape:
        raise ShapeError(f"update has shape {tuple(given[-1].shape)}; allowed: {tuple(sources[0].shape)}")
    out_dtype = result_dtype(sources, dtype)
    chosen = resolve(backend, given, out_dtype)
    settings = (eps, out_scale, norm_eps, out_dtype)
    if chosen == "cpu" and mix_alone and working_dtype(given) == torch.float32 and not wants_grad((given, *vectors)):
        return _read(sources, update, *vectors, *settings)
    if update is not None:
        sources = [*sources[:-1], (sources[-1] + update).to(sources[-1].dtype)]
    if count == 1 and not return_lse:  # nothing to compute: the source itself, not a copy of it
        chosen = "reference"
    arguments = (sources, *vectors, *settings)
    mixed, weights, lse = reference.read(*arguments) if chosen == "reference" else call("depth_attention", *arguments)
    if return_weights or return_lse:
        return DepthRead(mixed, weights if return_weights else None, lse if return_lse else None)
    return mixed if update is None else (mixed, sources[-1])


def _read(sources: Sequence[Tensor], update: Tensor | None, *arguments: Any) -> Tensor | tuple[Tensor, Tensor]:
    """The operator for reads of which only the mix is wanted, and no gradient."""
    return READ(sources, *arguments) if update is None else READ_UPDATED(sources, update, *arguments)


def _check_vectors(pseudo_query: Tensor, key_weight: Tensor | None, out_norm_weight: Tensor | None) -> None:
    if pseudo_query.dim() != 1:
        raise ShapeError(f"pseudo_query has shape {tuple(pseudo_query.shape)}; a read takes one vector [dim]")
    for name, vector in (("key_weight", key_weight), ("out_norm_weight", out_norm_weight)):
        if vector is not None and vector.shape != pseudo_query.shape:
            raise ShapeError(f"{name} has shape {tuple(vector.shape)}; allowed: {tuple(pseudo_query.shape)}")
