"""Makes Triton's interpreter fit for tests: two repairs, NaN in fresh memory, and a run in a process of its own.

The interpreter is chosen when Triton is imported, and it would change Triton for every later test in the process; so
the cases run in a child process with ``TRITON_INTERPRET=1``.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent


def run_cases(*arguments: str) -> None:
    """Run cases in a child process; its output is the message if one fails."""
    settings = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def repair_interpreter() -> None:
    """Scalars as loop bounds under NumPy 2.4, and bfloat16 rounded to nearest as on a device (the interpreter cuts)."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
    interpreter.InterpreterBuilder.cast_impl = _cast


def _cast(self, source, target):
    import triton.language as tl
    from triton.runtime import interpreter

    data, scalar = source.data, target.scalar
    if source.dtype.scalar == tl.bfloat16:
        data = (data.astype(np.uint32) << 16).view(np.float32)
    if scalar == tl.bfloat16:
        rounded = torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16)
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), scalar)
    return interpreter.TensorHandle(data.astype(interpreter._get_np_dtype(target)), scalar)


def nan_filled(shape, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """In place of `launch.empty`: what a kernel leaves unwritten is NaN."""
    return like.new_full(tuple(shape), float("nan"), dtype=dtype)
