"""Independent implementations that our reference is held against."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch


def fla_naive() -> ModuleType:
    """`fla.ops.attnres.naive` of fla-core, loaded by path: importing `fla.ops` itself would need triton."""
    spec = importlib.util.find_spec("fla")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = Path(next(iter(spec.submodule_search_locations))) / "ops" / "attnres" / "naive.py"
    name = "fla_ops_attnres_naive"
    if name not in sys.modules:
        module_spec = importlib.util.spec_from_file_location(name, path)
        assert module_spec is not None
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def direct_read(sources, query, weight, eps):
    """Eq. 2-4 in float64, written out: stack, normalise, score, softmax, mix."""
    values = torch.stack([source.double() for source in sources])
    keys = values / torch.sqrt(values.pow(2).mean(-1, keepdim=True) + eps) * weight.double()
    scores = torch.einsum("s...d,d->s...", keys, query.double())
    return torch.einsum("s...,s...d->...d", scores.softmax(0), values)
