"""Other people's depth attention, where it is installed; each is imported only here, and only when asked for.

What runs anywhere (`eager_peers`): fla-core's naive form and attn-res. What needs a GPU (`fused_peers`): fla-core's
fused form, liger-kernel, flash-attn-res (its phase 1 with a single query) and fast-attnres. A peer that is not
installed is left out; one that is installed and fails, or gives other numbers, is named with the reason.

attn-res has no key weight and rounds its keys to the dtype of the sources, so in float32 it computes the same read and
in bfloat16 a coarser one, which the gate then reports.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnres.bench.forms import EPS, Form


def eager_peers() -> list[Form]:
    """Peers in plain PyTorch."""
    return _installed(_fla_naive, _attn_res)


def fused_peers() -> list[Form]:
    """Peers with GPU kernels of their own."""
    return _installed(_fla_fused, _liger, _flash_attn_res, _fast_attnres)


def _installed(*makers: Callable[[], Form | None]) -> list[Form]:
    forms = [maker() for maker in makers]
    return [form for form in forms if form is not None]


def _fla_naive() -> Form | None:
    """Loaded by path: importing `fla.ops` would need triton."""
    folder = _folder("fla")
    if folder is None:
        return None
    module = _load("attnres_bench_fla_naive", folder / "ops" / "attnres" / "naive.py")

    def read(sources: Sequence[Tensor], query: Tensor, weight: Tensor) -> Tensor:
        return module.naive_attnres(query, sources, weight, rms_eps=EPS)

    return Form(name="fla-core naive", read=read)


def _attn_res() -> Form | None:
    """Its `AttnResOperator`, on sources stacked as its own model stacks them at every read."""
    if _folder("attn_res") is None:
        return None
    module: Any = importlib.import_module("attn_res.main")

    class Operator(torch.nn.Module):
        """The operator, with a query that is given instead of owned."""

        def __init__(self) -> None:
            super().__init__()
            self.key_norm = module.RMSNormNoWeight(EPS)

        def forward(self, sources: Sequence[Tensor], query: Tensor) -> Tensor:
            self.pseudo_query = query
            return module.AttnResOperator.forward(self, torch.stack(tuple(sources))[:, None])[0]

    return Form(name="attn-res", read=Operator(), folded=True, vectors_as_sources=True)


def _fla_fused() -> Form | None:
    if _folder("fla") is None:
        return None

    def read(sources: Sequence[Tensor], query: Tensor, weight: Tensor) -> Tensor:
        return importlib.import_module("fla.ops.attnres").fused_attnres(query, sources, weight, rms_eps=EPS)

    return Form(name="fla-core fused", read=read)


def _liger() -> Form | None:
    if _folder("liger_kernel") is None:
        return None

    def read(packed: Tensor, query: Tensor, weight: Tensor) -> Tensor:
        function = importlib.import_module("liger_kernel.ops.attn_res").LigerAttnResFunction
        return function.apply(packed, query, weight, EPS)

    return Form(name="liger-kernel", read=read, packed=True, vectors_as_sources=True)


def _flash_attn_res() -> Form | None:
    if _folder("flash_attn_res") is None:
        return None

    def read(packed: Tensor, query: Tensor) -> Tensor:
        phase_1 = importlib.import_module("flash_attn_res").phase_1_batched_attention_triton_op
        mixed, _ = phase_1(packed[:, None], query[None], EPS)
        return mixed[0, 0]

    return Form(name="flash-attn-res", read=read, packed=True, folded=True, vectors_as_sources=True)


def _fast_attnres() -> Form | None:
    """Its import name is ours too, so it is loaded under another."""
    try:
        location = metadata.distribution("fast-attnres").locate_file("attnres")
    except metadata.PackageNotFoundError:
        return None
    folder = Path(str(location))
    if not (folder / "api.py").is_file():
        return None

    def read(sources: Sequence[Tensor], query: Tensor) -> Tensor:
        return _load("attnres_bench_fast_attnres", folder / "__init__.py").attnres(list(sources), query, eps=EPS)

    return Form(name="fast-attnres", read=read, folded=True, vectors_as_sources=True)


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _load(name: str, path: Path) -> ModuleType:
    """A module, or with ``__init__.py`` a package, under a name of our choice."""
    if name in sys.modules:
        return sys.modules[name]
    search = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=search)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
