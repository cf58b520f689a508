"""Reads in two phases within a state: when phase 1 runs, and how a read is finished from it.

``"auto"`` decides by two measured break-evens (docs/performance.md). In training it defers: forward, each read goes
over its sources by itself, which is nearly as fast and keeps nothing of their size; backward, the finished sources are
gone over once per block. In evaluation phase 1 is computed ahead, where there are enough finished sources to save more
than its results cost to write and read again.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from attnres.ops import PartialSoftmax, inter_block, intra_block, partial_softmax
from attnres.ops.backends import resolve
from attnres.ops.precision import result_dtype
from attnres.ops.reference import finish
from attnres.ops.two_phase import NearSettings, carrier, read_near
from attnres.ops.two_phase import look_ahead as run_phase_1
from attnres.residual.state import Ahead, History

Phases = Literal["auto", "one", "two"]

MIN_FAR_IN_TRAINING = 2
"""Finished sources from which ``"auto"`` runs the backward pass of a block's reads together."""
MIN_FAR_IN_EVALUATION, MIN_READS_IN_EVALUATION, MIN_BYTES_IN_EVALUATION = 5, 8, 2**22
"""Finished sources, reads in the block, and bytes of one source from which ``"auto"`` computes phase 1 ahead.

Below that size the reads of a block are too short to be worth one more operator, and the more so in bfloat16, since
phase 1 is float32. From about half as many reads on it would save time, but less than it costs in memory: as many
``[tokens, dim]`` tensors as there are reads.
"""


def look_ahead(
    state: History,
    vectors: Sequence[tuple[Tensor, Tensor]],
    *,
    first: int,
    phases: Phases,
    eps: float,
    dtype: torch.dtype | None,
    training: bool,
) -> History:
    """The state with phase 1 of the next reads, if that is worth it.

    Args:
        state: At the start of a block.
        vectors: Pseudo-query and key weight of each of the block's reads.
        first: Index of the site of the first of these reads.
        phases: As of the strategy; not ``"one"``.
        eps: Of the key norm.
        dtype: Of the reads, where it is declared.
        training: Whether the model is in training mode.
    """
    sources, before = state.finished, () if state.ahead is None else state.ahead.carriers
    pays = phases != "auto" or _pays(sources, len(vectors), training)  # the cheap question first: decoding asks often
    fused = pays and resolve("auto", sources) != "reference"
    if not pays or (phases == "auto" and not fused):
        return History(sources, state.partial, None, state.last_read, state.extra)
    queries = torch.stack([query for query, _ in vectors])
    weights = torch.stack([weight for _, weight in vectors])
    if not fused or not (training or torch.is_grad_enabled()):
        part = inter_block(sources, queries, weights, eps=eps)
        reads = tuple(
            PartialSoftmax(mixed, lse) for mixed, lse in zip(part.mixed.unbind(), part.lse.unbind(), strict=True)
        )
        ahead = Ahead(reads, (), len(sources), first, deferred=False)
        return History(sources, state.partial, ahead, state.last_read, state.extra)
    deferred = phases == "auto" and training
    carriers = (*before, *(carrier(source) for source in sources[len(before) :]))
    reads, carriers = run_phase_1(
        sources, carriers, queries, weights, eps=eps, dtype=result_dtype(sources, dtype), deferred=deferred
    )
    ahead = Ahead(reads, carriers, len(sources), first, deferred)
    return History(sources, state.partial, ahead, state.last_read, state.extra)


def read_ahead(
    state: History,
    part: PartialSoftmax,
    pseudo_query: Tensor,
    key_weight: Tensor,
    *,
    eps: float,
    out_scale: float,
    dtype: torch.dtype | None,
    out_norm_weight: Tensor | None = None,
    out_norm_eps: float | None = None,
) -> Tensor:
    """Finish a read: merge its phase-1 result with the sources since (phase 2); the options of `depth_attention`."""
    ahead = state.ahead
    assert ahead is not None
    near = state.sources[ahead.far :]
    out_dtype = result_dtype(state.sources, dtype)
    norm_eps = eps if out_norm_eps is None else out_norm_eps
    if ahead.carriers:
        far = state.sources[: ahead.far] if ahead.deferred else ()
        read = read_near(part, far, near, pseudo_query, key_weight, NearSettings(eps, out_scale, out_dtype))
        return finish(read, out_norm_weight, 1.0, norm_eps, out_dtype)
    if len(near) <= 1:
        read = intra_block(
            part,
            near[0] if near else None,
            pseudo_query,
            key_weight,
            eps=eps,
            out_scale=out_scale,
            out_norm_weight=out_norm_weight,
            out_norm_eps=norm_eps,
            dtype=out_dtype,
        )
        assert isinstance(read, Tensor)
        return read
    merged = part.merge(partial_softmax(near, pseudo_query, key_weight, eps=eps))
    return finish(merged.mixed, out_norm_weight, out_scale, norm_eps, out_dtype)


def _pays(sources: Sequence[Tensor], reads: int, training: bool) -> bool:
    if training:
        return reads > 1 and len(sources) >= MIN_FAR_IN_TRAINING
    if reads < MIN_READS_IN_EVALUATION or len(sources) < MIN_FAR_IN_EVALUATION:
        return False
    enough = sources[0].numel() * sources[0].itemsize >= MIN_BYTES_IN_EVALUATION
    if not torch.compiler.is_compiling():
        return enough
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(enough)  # a graph for any number of tokens serves single ones as well
