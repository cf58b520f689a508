"""Whether the Triton kernels can run here, said in words, and their registration.

The only module of the package that may be imported anywhere: it loads Triton inside its functions.
"""

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from attnres.errors import BackendUnavailableError

NAMESPACE = "attnres"
DEVICE = "cuda"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_registered: list[torch.library.Library] = []


def unavailable() -> str | None:
    """Why no Triton kernel can run on this machine; None if one can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.hip is not None:
        return "the kernels are made for NVIDIA devices, and this torch is built for AMD"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"the device has compute capability {major}.{minor}, but the kernels need 8.0 (bfloat16)"
    return None


def supported(sources: Sequence[Tensor]) -> str | None:
    """Why the kernels cannot serve these sources on this machine; None if they can."""
    reason = unavailable()
    if reason is not None:
        return reason
    for index, source in enumerate(sources):
        if source.device.type != DEVICE:
            return f"source {index} is on {source.device}, but the kernels read CUDA memory"
        if source.dtype not in _DTYPES:
            names = ", ".join(str(dtype) for dtype in _DTYPES)
            return f"source {index} has dtype {source.dtype}; the kernels read {names}"
    return None


def register() -> None:
    """Register the kernels as the CUDA implementation of the operators. Doing so twice changes nothing.

    Raises:
        BackendUnavailableError: No Triton kernel can run on this machine.
    """
    reason = unavailable()
    if reason is not None:
        raise BackendUnavailableError(f"the Triton backend cannot run here: {reason}")
    if not _registered:
        _registered.append(implement("CUDA"))


def implement(key: str) -> torch.library.Library:
    """A library that implements all operators under one dispatch key; the implementation lives as long as it does.

    Triton's interpreter runs the same kernels on CPU tensors, so a test may ask for the key ``CPU``.
    """
    import attnres.ops.library  # noqa: F401  (defines the operators)
    from attnres.ops.triton import launchers

    library = torch.library.Library(NAMESPACE, "IMPL")
    for name, function in launchers.OPERATORS.items():
        library.impl(name, function, key)
    return library
