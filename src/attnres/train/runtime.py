"""The machine's part in a run: device, precision, threads, determinism.

`"auto"` settings are settled here before anything else happens, so that the run folder records what really ran and a
resume on a machine that would choose otherwise is refused instead of silently giving other numbers.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from attnres.errors import BackendUnavailableError, ConfigError
from attnres.train.config import RunConfig, TrainConfig


def resolve(config: RunConfig) -> RunConfig:
    """The same run with device, precision and threads settled for this machine.

    Raises:
        BackendUnavailableError: A device or precision was asked for by name and is not here.
    """
    device, evaluated = resolve_device(config.train.device), config.train.eval_precision
    train = replace(
        config.train,
        device=device,
        precision=_resolve_precision("precision", config.train.precision, device),
        eval_precision=evaluated and _resolve_precision("eval_precision", evaluated, device),
        threads=config.train.threads or torch.get_num_threads(),
    )
    return replace(config, train=train)


def resolve_device(device: str) -> str:
    """``"cpu"`` or ``"cuda"``.

    Raises:
        BackendUnavailableError: CUDA was asked for by name and is not here.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailableError("device is 'cuda', but PyTorch sees no CUDA device here; allowed: auto, cpu")
    return device


def _resolve_precision(name: str, precision: str, device: str) -> str:
    if precision == "auto":
        return "bf16" if has_fast_bf16(device) else "fp32"
    if precision == "bf16" and device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise BackendUnavailableError(f"{name} is 'bf16', but this GPU has no bfloat16; allowed: auto, fp32")
    return precision


def has_fast_bf16(device: str) -> bool:
    """Whether the hardware multiplies bfloat16: GPUs from Ampere on, CPUs with AMX or AVX512-BF16.

    Elsewhere a CPU emulates it, which is slower than float32.
    """
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return False  # PyTorch was told, or built, not to use vector instructions
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def autocast(train: TrainConfig) -> AbstractContextManager[object]:
    """Context of every forward pass of a resolved config."""
    if train.precision == "bf16":
        return torch.autocast(train.device, dtype=torch.bfloat16)
    return nullcontext()


@contextmanager
def runtime(train: TrainConfig) -> Iterator[None]:
    """Set threads and determinism of a resolved config, and put both back afterwards."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    if train.device == "cuda":  # cuBLAS is deterministic only with a workspace of fixed size
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(train.threads or threads)
    torch.use_deterministic_algorithms(train.deterministic)
    memory.fill_uninitialized_memory = False  # costs time and changes no result that is defined
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        memory.fill_uninitialized_memory = fill


def enable_activation_checkpointing(model: nn.Module, mode: str) -> None:
    """Switch on Transformers' own activation checkpointing of decoder layers.

    Raises:
        ConfigError: The model has none.
    """
    if mode == "none":
        return
    enable = getattr(model, "activation_checkpointing_enable", None)
    if not callable(enable):
        raise ConfigError(f"activation_checkpointing is {mode!r}, but {type(model).__name__} has none; allowed: none")
    enable(activation_checkpointing_kwargs={"use_reentrant": mode == "reentrant"})
