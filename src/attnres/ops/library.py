"""The operators that PyTorch knows: schemas, fake versions for tracing, and gradients.

Registered once for all backends, so that ``torch.compile``, ``torch.export`` and activation checkpointing see one
operator per step of the method whatever computes it. A backend adds its kernels under a device: the CPU kernel under
``CPU``, Triton under ``CUDA``. Nothing here computes.

All statistics (weights, log-sum-exp) and all phase-1 results are in the working dtype: float32, or float64 where a
source is float64. Outputs are contiguous and never alias an input.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres.ops.precision import working_dtype

NAMESPACE = "attnres"

_library = torch.library.Library(NAMESPACE, "DEF")

_library.define(
    "read(Tensor[] sources, Tensor pseudo_query, Tensor? key_weight, Tensor? out_norm_weight, float eps, "
    "float out_scale, float out_norm_eps, ScalarType? dtype) -> Tensor"
)
_library.define(
    "read_updated(Tensor[] sources, Tensor update, Tensor pseudo_query, Tensor? key_weight, Tensor? out_norm_weight, "
    "float eps, float out_scale, float out_norm_eps, ScalarType? dtype) -> (Tensor mixed, Tensor updated)"
)
_library.define(
    "depth_attention(Tensor[] sources, Tensor pseudo_query, Tensor? key_weight, Tensor? out_norm_weight, float eps, "
    "float out_scale, float out_norm_eps, ScalarType dtype) -> (Tensor mixed, Tensor depth_weights, Tensor lse)"
)
_library.define(
    "depth_attention_backward(Tensor? grad_mixed, Tensor? grad_weights, Tensor? grad_lse, Tensor[] sources, "
    "Tensor pseudo_query, Tensor? key_weight, Tensor? out_norm_weight, float eps, float out_scale, "
    "float out_norm_eps, bool[] needs) -> (Tensor[] grad_sources, Tensor grad_query, Tensor grad_key_weight, "
    "Tensor grad_out_norm_weight)"
)
_library.define(
    "inter_block(Tensor[] sources, Tensor pseudo_queries, Tensor? key_weights, float eps) -> (Tensor mixed, Tensor lse)"
)
_library.define(
    "inter_block_backward(Tensor?[] grad_mixed, Tensor?[] grad_lse, Tensor[] sources, Tensor pseudo_queries, "
    "Tensor? key_weights, float eps, Tensor?[] carried) "
    "-> (Tensor[] grad_sources, Tensor grad_queries, Tensor grad_key_weights)"
)
_library.define(
    "intra_block(Tensor mixed, Tensor lse, Tensor[] near, Tensor? update, Tensor pseudo_query, Tensor? key_weight, "
    "Tensor? out_norm_weight, float eps, float out_scale, float out_norm_eps, ScalarType dtype) "
    "-> (Tensor out, Tensor near_weights, Tensor partial)"
)
_library.define(
    "intra_block_backward(Tensor grad, Tensor out, Tensor[] near, Tensor near_weights, Tensor pseudo_query, "
    "Tensor? key_weight, float eps, float out_scale, ScalarType mixed_dtype) "
    "-> (Tensor grad_mixed, Tensor grad_lse, Tensor[] grad_near, Tensor grad_query, Tensor grad_key_weight)"
)


def _absent(like: Tensor) -> Tensor:
    """What stands for a tensor that was not asked for: no elements."""
    return like.new_empty(0)


def _like(tensor: Tensor | None, reference: Tensor) -> Tensor:
    return _absent(reference) if tensor is None else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _fake_read(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    eps: float,
    out_scale: float,
    out_norm_eps: float,
    dtype: torch.dtype | None,
) -> Tensor:
    return sources[0].new_empty(sources[0].shape, dtype=sources[0].dtype if dtype is None else dtype)


def _fake_read_updated(sources: Sequence[Tensor], update: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    del update
    return _fake_read(sources, *arguments), sources[-1].new_empty(sources[-1].shape)


def _fake_depth_attention(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    eps: float,
    out_scale: float,
    out_norm_eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    first, work = sources[0], working_dtype(sources)
    batch = first.shape[:-1]
    mixed = first.new_empty(first.shape, dtype=dtype)
    return mixed, first.new_empty((*batch, len(sources)), dtype=work), first.new_empty(batch, dtype=work)


def _fake_depth_attention_backward(
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
    grads = [
        source.new_empty(source.shape) if needed else _absent(source)
        for source, needed in zip(sources, needs, strict=True)
    ]
    return (
        grads,
        _like(pseudo_query, pseudo_query),
        _like(key_weight, pseudo_query),
        _like(out_norm_weight, pseudo_query),
    )


def _fake_inter_block(
    sources: Sequence[Tensor], pseudo_queries: Tensor, key_weights: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    first, work, reads = sources[0], working_dtype(sources), pseudo_queries.shape[0]
    return first.new_empty((reads, *first.shape), dtype=work), first.new_empty((reads, *first.shape[:-1]), dtype=work)


def _fake_inter_block_backward(
    grad_mixed: Sequence[Tensor | None],
    grad_lse: Sequence[Tensor | None],
    sources: Sequence[Tensor],
    pseudo_queries: Tensor,
    key_weights: Tensor | None,
    eps: float,
    carried: Sequence[Tensor | None],
) -> tuple[list[Tensor], Tensor, Tensor]:
    work = working_dtype(sources)
    grads = [source.new_empty(source.shape, dtype=work) for source in sources]
    return grads, _like(pseudo_queries, pseudo_queries), _like(key_weights, pseudo_queries)


def _fake_intra_block(
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
    weights = lse.new_empty((*mixed.shape[:-1], len(near)))
    partial = _absent(mixed) if update is None else near[-1].new_empty(near[-1].shape)
    return mixed.new_empty(mixed.shape, dtype=dtype), weights, partial


def _fake_intra_block_backward(
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
    return (
        grad.new_empty(grad.shape, dtype=mixed_dtype),
        near_weights.new_empty(near_weights.shape[:-1]),
        [source.new_empty(source.shape) for source in near],
        _like(pseudo_query, pseudo_query),
        _like(key_weight, pseudo_query),
    )


def _save_depth_attention(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    sources, query, weight, norm, *settings, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*sources, query, weight, norm)
    ctx.settings = tuple(settings)


def _differentiate_depth_attention(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    *sources, query, weight, norm = ctx.saved_tensors
    needs = [bool(needed) for needed in ctx.needs_input_grad[0]]
    d_sources, d_query, d_weight, d_norm = torch.ops.attnres.depth_attention_backward(
        *grads, sources, query, weight, norm, *ctx.settings, needs
    )
    d_sources = [d_source if needed else None for d_source, needed in zip(d_sources, needs, strict=True)]
    return d_sources, d_query, _given(weight, d_weight), _given(norm, d_norm), None, None, None, None


def _save_inter_block(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    sources, queries, weights, ctx.eps = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*sources, queries, weights)


def _differentiate_inter_block(ctx: Any, grad_mixed: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    *sources, queries, weights = ctx.saved_tensors
    reads = queries.shape[0]
    d_sources, d_queries, d_weights = torch.ops.attnres.inter_block_backward(
        [None] * reads if grad_mixed is None else list(grad_mixed.unbind()),
        [None] * reads if grad_lse is None else list(grad_lse.unbind()),
        sources,
        queries,
        weights,
        ctx.eps,
        [None] * len(sources),
    )
    d_sources = [grad.to(source.dtype) for grad, source in zip(d_sources, sources, strict=True)]
    return d_sources, d_queries, _given(weights, d_weights), None


def _save_intra_block(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, near, update, query, weight, norm, eps, scale, _, _ = inputs
    out, near_weights, partial = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(near_weights)
    if update is not None:
        near = [*near[:-1], partial]
    ctx.save_for_backward(out, near_weights, *near, query, weight)
    ctx.updated, ctx.normed, ctx.settings, ctx.mixed_dtype = (
        update is not None,
        norm is not None,
        (eps, scale),
        inputs[0].dtype,
    )


def _differentiate_intra_block(
    ctx: Any, grad: Tensor | None, grad_weights: Tensor | None, grad_partial: Tensor | None
) -> tuple[Any, ...]:
    if ctx.normed:
        raise RuntimeError("attnres::intra_block has no gradient with the following norm fused in; apply it afterwards")
    out, near_weights, *near, query, weight = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    d_mixed, d_lse, d_near, d_query, d_weight = torch.ops.attnres.intra_block_backward(
        grad, out, near, near_weights, query, weight, *ctx.settings, ctx.mixed_dtype
    )
    d_near, d_update = list(d_near), None
    if ctx.updated:
        if grad_partial is not None:
            d_near[-1] = d_near[-1] + grad_partial
        d_update = d_near[-1]
    return d_mixed, d_lse, d_near, d_update, d_query, _given(weight, d_weight), None, None, None, None, None


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _refuse(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    """In place of second derivatives, which torch would otherwise leave out with no more than a warning."""
    raise RuntimeError(
        "the kernels of attnres have first derivatives only; for second ones compute the read with "
        'backend="reference", or inside attnres.ops.use_backend("reference")'
    )


def call(name: str, *arguments: Any) -> Any:
    """Call an operator, past autograd where no gradient is wanted: its bookkeeping costs more than a short read."""
    operator = getattr(torch.ops.attnres, name).default
    if torch.compiler.is_compiling() or wants_grad(arguments):
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def wants_grad(arguments: Sequence[Any]) -> bool:
    """Whether autograd would have to follow an operator with these arguments."""
    if not torch.is_grad_enabled():
        return False
    return any(
        leaf.requires_grad
        for argument in arguments
        for leaf in (argument if isinstance(argument, list | tuple) else (argument,))
        if isinstance(leaf, Tensor)
    )


def _given(tensor: Tensor | None, grad: Tensor) -> Tensor | None:
    return None if tensor is None else grad


for _name, _fake in (
    ("read", _fake_read),
    ("read_updated", _fake_read_updated),
    ("depth_attention", _fake_depth_attention),
    ("depth_attention_backward", _fake_depth_attention_backward),
    ("inter_block", _fake_inter_block),
    ("inter_block_backward", _fake_inter_block_backward),
    ("intra_block", _fake_intra_block),
    ("intra_block_backward", _fake_intra_block_backward),
):
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)

READ, READ_UPDATED = torch.ops.attnres.read.default, torch.ops.attnres.read_updated.default
"""The operators for inference: a read of which only the mix is wanted, also with an update of its last source."""

torch.library.register_autograd(
    f"{NAMESPACE}::depth_attention",
    _differentiate_depth_attention,
    setup_context=_save_depth_attention,
    lib=_library,
)
torch.library.register_autograd(
    f"{NAMESPACE}::inter_block", _differentiate_inter_block, setup_context=_save_inter_block, lib=_library
)
torch.library.register_autograd(
    f"{NAMESPACE}::intra_block", _differentiate_intra_block, setup_context=_save_intra_block, lib=_library
)
for _name in ("depth_attention_backward", "inter_block_backward", "intra_block_backward"):
    torch.library.register_autograd(f"{NAMESPACE}::{_name}", _refuse, setup_context=_save_nothing, lib=_library)
