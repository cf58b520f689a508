"""How kernels are launched: memory for results, warps by width, number of programs, stages by row size.

A table instead of timing-based tuning: warps and programs fix the order in which numbers are added up, so they may
depend on the device and on shapes but never on a stopwatch; and warps never on the number of tokens, so that a token's
result is the same bits in any chunk.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

MAX_WIDTH = 16384
"""Widest row that one program holds in registers; wider rows go to the kernels that tile the width."""
RESIDENT_WARPS = 16
"""Warps that a persistent launch keeps on each multiprocessor; with 128 registers a thread they just fit."""
STAGE_BYTES = 96 * 1024
"""Shared memory that a program may fill with rows on their way; two programs fit on a multiprocessor."""
MAX_STAGES = 4
INTERPRETER_PROGRAMS = 3
"""Programs of a persistent launch without a device: few, so that some handle several tokens."""

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}


def empty(shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Uninitialised memory beside ``like``. Every result is allocated here, so a test can fill it with NaN first."""
    return like.new_empty(tuple(shape), dtype=dtype)


def absent(like: Tensor) -> Tensor:
    """What the operators return for a tensor that was not asked for: no elements."""
    return like.new_empty(0)


def contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors as a kernel takes a plain pointer; those that are contiguous are not copied."""
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device the current one, where Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def power_of_two(size: int) -> int:
    """The smallest power of two that holds ``size``."""
    return 1 << max(0, size - 1).bit_length()


def tiles(size: int, tile: int) -> int:
    """How many tiles cover ``size``."""
    return -(-size // tile)


@dataclass(frozen=True)
class Shape:
    """How many programs of how many warps work on rows of one width."""

    block: int
    """The power of two that a row is padded to."""
    warps: int
    programs: int
    """At most one per token; each walks over tokens with this stride."""


def shape_of(tokens: int, width: int, like: Tensor, elements: int = 32, resident: int = RESIDENT_WARPS) -> Shape:
    """The launch shape for rows of ``width``, with about ``elements`` of a row in each thread."""
    block = max(16, power_of_two(width))
    warps = min(32, max(1, block // (32 * elements)))
    programs = processors_of(like.device) * max(1, resident // warps) if like.is_cuda else INTERPRETER_PROGRAMS
    return Shape(block, warps, min(tokens, programs))


@cache
def processors_of(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def stages_of(size: int) -> int:
    """Stages of a pipelined loop that loads ``size`` bytes in each round; one less is the number in flight."""
    return max(1, min(MAX_STAGES, 1 + STAGE_BYTES // size))
