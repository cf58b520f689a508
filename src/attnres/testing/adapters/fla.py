"""fla-core: its plain form, which runs anywhere, and its fused one, which needs a GPU."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import final

import torch
from torch import Tensor

from attnres.testing.adapter import Adapter

FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)
"""Its documented arithmetic is float32 for every dtype."""


@final
class Naive(Adapter):
    """`fla.ops.attnres.naive.naive_attnres`."""

    name = "fla-core naive"
    dtypes = FLOAT32

    def __init__(self) -> None:
        self.version = metadata.version("fla-core")
        self.module = _by_path()

    def read(self, sources: Sequence[Tensor], query: Tensor, key_weight: Tensor | None, *, eps: float) -> Tensor:
        """One call."""
        return self.module.naive_attnres(query, sources, key_weight, rms_eps=eps)


@final
class Fused(Adapter):
    """`fla.ops.attnres.fused_attnres`."""

    name = "fla-core fused"
    dtypes = FLOAT32
    device = "cuda"

    def __init__(self) -> None:
        self.version = metadata.version("fla-core")
        self.function = importlib.import_module("fla.ops.attnres").fused_attnres

    def read(self, sources: Sequence[Tensor], query: Tensor, key_weight: Tensor | None, *, eps: float) -> Tensor:
        """One call."""
        return self.function(query, sources, key_weight, rms_eps=eps)


def _by_path() -> ModuleType:
    """The plain form, loaded by path: importing `fla.ops` would need triton."""
    name = "attnres_testing_fla_naive"
    if name not in sys.modules:
        package = importlib.util.find_spec("fla")
        assert package is not None
        assert package.submodule_search_locations
        path = Path(package.submodule_search_locations[0]) / "ops" / "attnres" / "naive.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
