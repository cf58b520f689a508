"""Which implementation computes a read.

Parameters, checkpoints and results do not depend on it: the reference is the definition and the kernels agree with it
to rounding. What a kernel cannot do (a dtype, a function transform) goes to the reference, and the log says so once.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from attnres.errors import BackendUnavailableError, ConfigError

logger = logging.getLogger("attnres")

Backend = Literal["auto", "reference", "cpu", "triton"]

_default: Backend = "auto"
_said: set[str] = set()

_is_tracing, _is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_transform_level = torch._C._functorch.maybe_current_level  # pyright: ignore[reportAttributeAccessIssue]
_forward_derivatives = torch.autograd.forward_ad

_CPU_DTYPES = frozenset({torch.float32, torch.bfloat16})
_TRITON_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def resolve(backend: Backend, sources: Sequence[Tensor], dtype: torch.dtype | None = None) -> Backend:
    """The implementation for these sources: the one asked for, or with ``"auto"`` the fastest that can do them.

    ``dtype`` is that of the result, where it may be none of theirs.

    Raises:
        BackendUnavailableError: The one asked for cannot do them, with the reason.
        ConfigError: There is none of that name.
    """
    if backend == "auto":
        backend = _default
    if backend == "auto":
        name = _kernel_for(sources)
        refusal = None if name is None else _refusal(name, sources, dtype)
        _say_once(name, refusal)
        return "reference" if name is None or refusal is not None else name
    _check_name(backend)
    refusal = _refusal(backend, sources, dtype)
    if refusal is not None:
        raise BackendUnavailableError(f"backend {backend!r} is not available: {refusal}")
    return backend


def in_reach(backend: Backend, sources: Sequence[Tensor]) -> bool:
    """Whether the CPU kernel can be called without further questions, as for the short reads of decoding.

    Then the kernel checks its arguments itself. It is for inference, and for ``"auto"`` once that has meant the kernel.
    Between two sublayers of a model the caches hold weights, and every question costs several times what it does in a
    loop; so there are few, and none goes through a module.
    """
    return (
        not _is_tracing()  # first, so that no graph depends on what follows
        and not _is_grad_enabled()
        and sources[0].is_cpu
        and backend == "auto"
        and _default == "auto"
        and "cpu" in _said  # the choice is said before it is taken for granted
        and not _transformed()
    )


@contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Make ``backend`` what ``"auto"`` stands for, in all threads, inside a ``with`` block.

    Examples:
        >>> with use_backend("reference"):  # for instance for second derivatives, which the kernels do not have
        ...     resolve("auto", [torch.ones(2, 4)])
        'reference'
    """
    global _default
    _check_name(backend)
    before, _default = _default, backend
    try:
        yield
    finally:
        _default = before


def _check_name(backend: str) -> None:
    if backend not in get_args(Backend):
        raise ConfigError(f"backend is {backend!r}; allowed: {', '.join(get_args(Backend))}")


def _kernel_for(sources: Sequence[Tensor]) -> Backend | None:
    """The kernel of the device; none for float64, which is for checking and not for speed."""
    if sources[0].dtype == torch.float64:
        return None
    kind = sources[0].device.type
    return "cpu" if kind == "cpu" else "triton" if kind == "cuda" else None


def _refusal(backend: Backend, sources: Sequence[Tensor], dtype: torch.dtype | None) -> str | None:
    """Why a backend cannot do these sources; None when it can."""
    if backend == "reference":
        return None
    if _transformed():
        return "torch.func transforms and forward-mode derivatives need the reference"
    kind, wanted = sources[0].device.type, "cpu" if backend == "cpu" else "cuda"
    if kind != wanted:
        return f"the sources are on {kind}; it takes {wanted}"
    allowed = _CPU_DTYPES if backend == "cpu" else _TRITON_DTYPES
    dtypes = {source.dtype for source in sources} | ({dtype} if dtype else set())
    if not dtypes <= allowed and dtypes != {torch.float64}:
        seen, names = (", ".join(sorted(str(dtype)[6:] for dtype in group)) for group in (dtypes, allowed))
        return f"sources and result have dtype {seen}; it takes {names}, or float64 alone"
    return _cpu_problem() if backend == "cpu" else _triton_problem()


def _transformed() -> bool:
    return _transform_level() is not None or _forward_derivatives._current_level >= 0


def _cpu_problem() -> str | None:
    from attnres.ops import cpu

    return cpu.problem()


def _triton_problem() -> str | None:
    from attnres.ops import triton

    reason = triton.unavailable()
    if reason is None:
        triton.register()
    return reason


# Looked up when a graph is traced, not traced: what torch.compiler.assume_constant_result sets, which would import
# Dynamo along with attnres.
for _lookup in (_cpu_problem, _triton_problem):
    vars(_lookup)["_dynamo_marked_constant"] = True


def _say_once(name: Backend | None, refusal: str | None) -> None:
    if torch.compiler.is_compiling():
        return
    text = f"{name}: {refusal}" if refusal else str(name)
    if name is None or text in _said:
        return
    _said.add(text)
    if refusal is None:
        logger.info("depth attention uses the %s kernel", name)
    else:
        logger.info("depth attention uses the reference, not the %s kernel: %s", name, refusal)
