"""Triton's interpreter: GPU kernels on CPU tensors, in a process of its own.

The interpreter is chosen by ``TRITON_INTERPRET=1`` when Triton is imported, and from then on there is no other Triton
in the process; so an implementation that needs it is run in a child process.
"""

import os
from typing import Any

import torch

_kept: list[Any] = []


def is_interpreting() -> bool:
    """Whether this process was started for the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def kernels_for_cpu() -> None:
    """Let our backend ``"cpu"`` be the Triton kernels for the rest of this process."""
    from attnres.ops import cpu
    from attnres.ops.triton.support import implement

    if not _kept:
        repair()
        cpu.problem = lambda: None  # nothing is compiled, and nothing else registered for the CPU
        _kept.append(implement("CPU"))


def repair() -> None:
    """Scalars as loop bounds under NumPy 2.4, and bfloat16 rounded to nearest as on a device (the interpreter cuts)."""
    from triton.runtime import interpreter

    if interpreter.InterpreterBuilder.cast_impl is _cast:
        return
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
    interpreter.InterpreterBuilder.cast_impl = _cast  # pyright: ignore[reportAttributeAccessIssue]


def _cast(self: Any, source: Any, target: Any) -> Any:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    data, scalar = source.data, target.scalar
    if source.dtype.scalar == tl.bfloat16:
        data = (data.astype(np.uint32) << 16).view(np.float32)
    if scalar == tl.bfloat16:
        rounded = torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16)
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), scalar)
    return interpreter.TensorHandle(data.astype(interpreter._get_np_dtype(target)), scalar)
