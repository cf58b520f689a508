"""The byte model: what any implementation of a read must move, and the bandwidth it can be moved at.

Depth attention computes almost nothing, so the time to move its bytes is its floor. A forward read takes ``n`` source
rows from memory and writes one. The backward reads the sources and one gradient and writes a gradient per source. The
small vectors and the ``O(n T)`` statistics are left out, and so is whatever an implementation reads twice.

The bandwidth is that of a plain copy of as many bytes as the sources have. A read writes less than it reads and a copy
writes as much, so a multiple slightly under one is possible. Where the last-level cache holds all sources (some servers
have hundreds of megabytes of it), source and copy both run from the cache; the multiple still compares like with like.
"""

import torch
from torch import Tensor

GPU_COPY_BYTES = 2**30
"""Least size of the copy on a GPU: a small one would measure the launch."""


def rows_moved(sources: int, direction: str) -> int:
    """Rows ``[T, D]`` that must cross memory: ``n + 1`` forward, ``3 n + 2`` forward and backward together.

    Examples:
        >>> rows_moved(9, "forward"), rows_moved(9, "forward+backward")
        (10, 29)
    """
    return sources + 1 if direction == "forward" else 3 * sources + 2


def bytes_moved(sources: int, tokens: int, dim: int, dtype: torch.dtype, direction: str) -> int:
    """Bytes that any implementation must move."""
    return rows_moved(sources, direction) * tokens * dim * dtype.itemsize


class CopyArm:
    """A copy of a given size, to be timed among the arms; `bandwidth` turns its best time into bytes per second."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device):
        if device.type == "cuda":
            elements = max(elements, GPU_COPY_BYTES // dtype.itemsize)
        self.source = torch.ones(elements, dtype=dtype, device=device)
        self.target = torch.zeros_like(self.source)

    def __call__(self) -> Tensor:
        """Copy once."""
        return self.target.copy_(self.source)

    def bandwidth(self, best_seconds: float) -> float:
        """Bytes read plus bytes written per second."""
        return 2 * self.source.numel() * self.source.element_size() / best_seconds
