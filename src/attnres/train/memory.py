"""Peak memory of a run, on the CPU (resident set) or the GPU (allocated tensors)."""

import resource
import sys
from pathlib import Path

import torch

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def reset_peak_memory(device: str) -> None:
    """Start a new measurement; where the system cannot, the peak since the start of the process is what is left."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        _CLEAR.write_text("5")  # Linux: resets the high-water mark of the resident set
    except OSError:
        return


def peak_memory_bytes(device: str) -> int:
    """Largest memory in use since `reset_peak_memory`, in bytes.

    On the CPU it is the resident set of the whole process, interpreter and libraries included.
    """
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
