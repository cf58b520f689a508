"""Golden vectors: reads, merges and whole schedules in float64, as files that any language can read.

``golden.json`` lists the cases and says how each is made; the tensors are in safetensors files beside it. The format is
described in docs/conformance.md. ``python -m attnres.testing.golden`` makes the files anew.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parent
INDEX = "golden.json"


@final
@dataclass(frozen=True, kw_only=True)
class ReadCase:
    """One read with its value and gradients."""

    name: str
    definition: str
    eps: float
    sources: list[Tensor]
    """Each ``[*batch, dim]``, oldest first."""
    query: Tensor
    key_weight: Tensor | None
    value: Tensor
    weights: Tensor
    """Depth weights, ``[sources, *batch]``."""
    lse: Tensor
    """Log-sum-exp of the scores, ``[*batch]``."""
    upstream: Tensor
    """Gradient of the value that the gradients below belong to."""
    grad_sources: list[Tensor]
    grad_query: Tensor
    grad_key_weight: Tensor | None


@final
@dataclass(frozen=True, kw_only=True)
class MergeCase:
    """One read in two phases."""

    name: str
    eps: float
    finished: list[Tensor]
    partial: Tensor
    query: Tensor
    key_weight: Tensor
    finished_mixed: Tensor
    """Mix over the finished sources alone."""
    finished_lse: Tensor
    partial_lse: Tensor
    """Score of the partial sum."""
    value: Tensor
    lse: Tensor
    """Of both together."""


@final
@dataclass(frozen=True, kw_only=True)
class ScheduleCase:
    """A model whose sublayer ``i`` is ``y = matrices[i] x``, with all its reads."""

    name: str
    definition: str
    eps: float
    sublayers_per_block: int
    members: list[list[list[int]]]
    """Per read, per source: the sublayers in it; -1 is the embedding."""
    embedding: Tensor
    matrices: Tensor
    queries: Tensor
    key_weights: Tensor
    reads: Tensor
    """``[sublayers + 1, 1, tokens, dim]``, the output read last."""


@final
@dataclass(frozen=True)
class Golden:
    """All cases."""

    reads: list[ReadCase]
    merges: list[MergeCase]
    schedules: list[ScheduleCase]


@cache
def load(folder: Path = FOLDER) -> Golden:
    """Read the files."""
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    kinds = [(ReadCase, "reads"), (MergeCase, "merges"), (ScheduleCase, "schedules")]
    return Golden(*([kind(**_case(case, _tensors(folder, name))) for case in index[name]] for kind, name in kinds))


@cache
def _tensors(folder: Path, name: str) -> dict[str, Tensor]:
    return load_file(folder / f"{name}.safetensors")


def _case(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The fields of a case: those of the index that are no mere description, and its tensors."""
    prefix = f"{case['name']}/"
    fields = {key: value for key, value in case.items() if key not in ("num_sublayers", "shape", "about")}
    fields |= {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    for name in ("sources", "grad_sources", "finished"):
        if name in fields:
            fields[name] = list(fields[name].unbind(0))
    if "grad_query" in fields:
        fields = {"key_weight": None, "grad_key_weight": None} | fields
    return fields
