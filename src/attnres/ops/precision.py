"""Which precision a read computes in and returns.

The numerics contract in one place: scores, softmax and mix are float32 for every input dtype (float64 for float64
inputs) and the result is rounded once, to a dtype that is either common to all sources or declared by the caller.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from attnres.errors import ShapeError


def working_dtype(sources: Sequence[Tensor]) -> torch.dtype:
    """The dtype of scores, softmax and mix: float64 when any source is float64, else float32."""
    return torch.float64 if any(source.dtype == torch.float64 for source in sources) else torch.float32


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Context in which operations on the device of a tensor keep the dtypes that they are given.

    The meta device has no autocast, so there is nothing to switch off.
    """
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


def result_dtype(sources: Sequence[Tensor], declared: torch.dtype | None) -> torch.dtype:
    """The dtype of the mix: the declared one, or the one that all sources share.

    Raises:
        ShapeError: The sources differ in dtype and none was declared; promoting silently would let one float32 source
            (an embedding under autocast, say) turn the whole stream into float32.
    """
    if declared is not None:
        return declared
    dtypes = {source.dtype for source in sources}
    if len(dtypes) > 1:
        names = ", ".join(str(source.dtype) for source in sources)
        raise ShapeError(f"sources have different dtypes ({names}); declare the result's with dtype=")
    return sources[0].dtype


def check_sources(sources: Sequence[Tensor], pseudo_query: Tensor, key_weight: Tensor | None) -> None:
    """Raise `ShapeError` unless there is a source and sources, query and key weight fit together."""
    if len(sources) == 0:
        raise ShapeError("depth attention got 0 sources; it needs at least 1")
    shape = sources[0].shape
    for index, source in enumerate(sources):
        if source.shape != shape:
            raise ShapeError(f"source {index} has shape {tuple(source.shape)}, but source 0 has {tuple(shape)}")
    for dtype in {source.dtype for source in sources}:
        if not dtype.is_floating_point:
            raise ShapeError(f"a source has dtype {dtype}; allowed are floating-point dtypes")
    if len(shape) == 0:
        raise ShapeError("sources are scalars; they need at least the width dimension")
    for name, vector in (("pseudo_query", pseudo_query), ("key_weight", key_weight)):
        if vector is not None and vector.shape[-1:] != shape[-1:]:
            raise ShapeError(f"{name} has shape {tuple(vector.shape)}, but the sources have width {shape[-1]}")
