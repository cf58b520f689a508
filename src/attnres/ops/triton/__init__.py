"""The operators as Triton kernels for CUDA.

Importing this package costs nothing: Triton itself is imported only by the kernel modules, which `register` loads. The
reference in `attnres.ops` defines every result; a kernel is an optimisation of it.

Two levels. Kernels that hold a token's row in registers serve widths up to `launch.MAX_WIDTH`; kernels that walk over
the width in tiles (`tiles`) serve any width and any number of sources, and the backward of phase 1. Each operator's
module chooses between them.
"""

from attnres.ops.triton.support import register, supported, unavailable

__all__ = ["register", "supported", "unavailable"]
