"""The adapters that ship with the suite: our own backends, and other people's implementations where installed."""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import final

import torch

from attnres.errors import ConfigError
from attnres.ops import cpu
from attnres.testing.adapter import Adapter


@final
@dataclass(frozen=True, kw_only=True)
class Shipped:
    """Where an adapter is, and what it needs."""

    name: str
    """Word for it on the command line."""
    place: str
    """``module:Class`` below this package."""
    package: str | None = None
    """Import name of the package it adapts."""
    distribution: str = ""
    """Its name on PyPI."""
    needs_gpu: bool = False
    """Whether there is nothing to run without a GPU."""
    is_triton: bool = False
    """Whether it is Triton kernels, which without a GPU run in Triton's interpreter."""

    def problem(self) -> str | None:
        """Why it cannot run here; None if it can."""
        for package, distribution in (
            (self.package, self.distribution),
            ("triton" if self.is_triton else None, "triton"),
        ):
            if package is not None and importlib.util.find_spec(package) is None:
                return f"{distribution} is not installed"
        if self.needs_gpu and not torch.cuda.is_available():
            return "needs a GPU"
        return cpu.problem() if self.name == "cpu" else None

    @property
    def needs_interpreter(self) -> bool:
        """Whether it has to run in a child process with Triton's interpreter."""
        return self.is_triton and not torch.cuda.is_available()

    def make(self) -> Adapter:
        """The adapter itself; imports what it adapts."""
        module, name = self.place.split(":")
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)()


_ALL = (
    Shipped(name="reference", place="ours:Reference"),
    Shipped(name="cpu", place="ours:Cpu"),
    Shipped(name="triton", place="triton:Triton", is_triton=True),
    Shipped(name="fla-naive", place="fla:Naive", package="fla", distribution="fla-core"),
    Shipped(name="fla-fused", place="fla:Fused", package="fla", distribution="fla-core", needs_gpu=True),
    Shipped(name="liger", place="liger:Liger", package="liger_kernel", distribution="liger-kernel", is_triton=True),
    Shipped(name="attn-res", place="attn_res:AttnRes", package="attn_res", distribution="attn-res"),
    Shipped(
        name="inkling2",
        place="inkling2:Inkling2",
        package="transformers.models.inkling2",
        distribution="transformers with inkling2",
    ),
    Shipped(
        name="inkling2-as-kimi",
        place="inkling2:AsKimi",
        package="transformers.models.inkling2",
        distribution="transformers with inkling2",
    ),
)
SHIPPED = {shipped.name: shipped for shipped in _ALL}
OURS = ("reference", "cpu", "triton")
"""Those of this project, which have to pass every check."""


def shipped(name: str) -> Shipped:
    """The shipped adapter of a name.

    Raises:
        ConfigError: There is none.
    """
    if name not in SHIPPED:
        raise ConfigError(f"adapter is {name!r}; allowed: {', '.join(SHIPPED)}, a file.py, or module:Class")
    return SHIPPED[name]
