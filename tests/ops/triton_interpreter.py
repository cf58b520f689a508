"""Triton's interpreter in tests: NaN in fresh memory, and a run in a process of its own.

The interpreter is chosen when Triton is imported, and it would change Triton for every later test in the process; so
the cases run in a child process with ``TRITON_INTERPRET=1``.
"""

import os
import subprocess
import sys
from pathlib import Path

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


def nan_filled(shape, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """In place of `launch.empty`: what a kernel leaves unwritten is NaN."""
    return like.new_full(tuple(shape), float("nan"), dtype=dtype)
