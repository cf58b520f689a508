"""Making the golden vectors: inputs that are exact in float32, results by the definition in float64."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from attnres.testing.definition import DEFINITIONS, KIMI, members, run
from attnres.testing.golden import INDEX

Tensors = dict[str, Tensor]

READS: list[dict[str, Any]] = [
    {"name": "one-source", "shape": [1, 2, 8], "about": "a single source is the result"},
    {"name": "two-sources", "shape": [2, 3, 8], "about": "the smallest softmax"},
    {"name": "nine-sources", "shape": [9, 2, 3, 16], "about": "two batch dimensions"},
    {"name": "odd-width", "shape": [4, 3, 13], "about": "no power of two"},
    {"name": "width-one", "shape": [3, 4, 1], "about": "a key is a sign"},
    {"name": "many-sources", "shape": [57, 2, 8], "about": "more sources than usual kernels hold"},
    {"name": "large-eps", "shape": [3, 3, 8], "eps": 0.5, "about": "eps as large as a mean square"},
    {"name": "zero-query", "shape": [5, 3, 8], "query": 0.0, "about": "the mean of the sources"},
    {"name": "zero-source", "shape": [3, 3, 8], "zero": 1, "about": "source 1 is zeros and scores 0"},
    {"name": "identical-sources", "shape": [4, 3, 8], "identical": True, "about": "the result is that source"},
    {"name": "loud-source", "shape": [3, 3, 8], "loud": 4096.0, "about": "source 0 is 4096 times as large"},
    {
        "name": "saturated",
        "shape": [4, 3, 8],
        "query": 512.0,
        "about": "scores of hundreds; one source has all the weight",
    },
    {"name": "inkling-2", "shape": [4, 3, 16], "definition": "inkling-2", "about": "the Inkling-2 variant"},
]
MERGES: list[dict[str, Any]] = [
    {"name": "balanced", "shape": [4, 3, 8], "query": 1.0, "about": "both phases have weight"},
    {"name": "far-apart", "shape": [4, 3, 8], "query": 512.0, "about": "one phase has all the weight"},
]
SCHEDULES = [(6, 2), (6, 1), (5, 3), (4, 8), (13, 4)]
EPS = 1e-5


def make(folder: Path) -> None:
    """Write all files."""
    kinds = {"reads": [_read(case) for case in READS], "merges": [_merge(case) for case in MERGES]}
    kinds["schedules"] = [_schedule(*case) for case in SCHEDULES]
    index: dict[str, Any] = {"format": 1, "page": "docs/conformance.md", "dtype": "float64"}
    for kind, made in kinds.items():
        index[kind] = [case for case, _ in made]
        named = {f"{case['name']}/{name}": tensor for case, tensors in made for name, tensor in tensors.items()}
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / f"{kind}.safetensors")
        (folder / f"{kind}.safetensors").chmod(0o644)  # safetensors makes files that only their owner may read
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _numbers(seed: str, *shape: int, scale: float = 1.0) -> Tensor:
    """Uniform in [-2, 2] in steps of 2^-12, so that they are the same numbers in float32 and on any machine."""
    generator = random.Random(seed)
    count = torch.Size(shape).numel()
    return (
        torch.tensor([generator.randint(-(2**13), 2**13) / 2**12 * scale for _ in range(count)]).double().reshape(shape)
    )


def _vectors(name: str, dim: int, scale: float) -> tuple[Tensor, Tensor]:
    return _numbers(f"{name} query", dim, scale=scale), 1 + _numbers(f"{name} key weight", dim) / 4


def _sources(case: dict[str, Any]) -> Tensor:
    sources = _numbers(f"{case['name']} sources", *case["shape"])
    sources[0] *= case.get("loud", 1.0)
    if "zero" in case:
        sources[case["zero"]] = 0
    return sources[:1].expand_as(sources).clone() if case.get("identical") else sources


def _read(case: dict[str, Any]) -> tuple[dict[str, Any], Tensors]:
    definition, eps = DEFINITIONS[case.get("definition", KIMI.name)], case.get("eps", EPS)
    sources = _sources(case).requires_grad_()
    query, weight = _vectors(case["name"], sources.shape[-1], case.get("query", 1.0))
    vectors = [query.requires_grad_(), *([weight.requires_grad_()] if definition.has_key_weight else [])]
    arguments = (list(sources), query, weight if definition.has_key_weight else None)
    value = definition.read(*arguments, eps=eps)
    upstream = _numbers(f"{case['name']} upstream", *value.shape)
    gradients = torch.autograd.grad(value, [sources, *vectors], upstream, materialize_grads=True)
    with torch.no_grad():
        tensors = {"sources": sources, "query": query, "value": value, "upstream": upstream}
        tensors |= {"weights": definition.weights(*arguments, eps)}
        tensors |= {"lse": definition.scores(*arguments, eps).logsumexp(0)}
    tensors |= dict(zip(("grad_sources", "grad_query", "grad_key_weight"), gradients, strict=False))
    tensors |= {"key_weight": weight} if definition.has_key_weight else {}
    about = {
        "name": case["name"],
        "definition": definition.name,
        "eps": eps,
        "shape": case["shape"],
        "about": case["about"],
    }
    return about, {name: tensor.detach() for name, tensor in tensors.items()}


def _merge(case: dict[str, Any]) -> tuple[dict[str, Any], Tensors]:
    sources = _sources(case)
    query, weight = _vectors(case["name"], sources.shape[-1], case["query"])
    scores = KIMI.scores(list(sources), query, weight, EPS)
    tensors = {
        "finished": sources[:-1],
        "partial": sources[-1],
        "query": query,
        "key_weight": weight,
        "finished_mixed": KIMI.read(list(sources[:-1]), query, weight, eps=EPS),
        "finished_lse": scores[:-1].logsumexp(0),
        "partial_lse": scores[-1],
        "value": KIMI.read(list(sources), query, weight, eps=EPS),
        "lse": scores.logsumexp(0),
    }
    return {"name": case["name"], "eps": EPS, "shape": case["shape"], "about": case["about"]}, tensors


def _schedule(count: int, size: int, dim: int = 8) -> tuple[dict[str, Any], Tensors]:
    name = f"{count}-sublayers-{size}-per-block"
    tensors = {
        "embedding": _numbers(f"{name} embedding", 1, 2, dim),
        "matrices": _numbers(f"{name} matrices", count, dim, dim, scale=0.25),
        "queries": _numbers(f"{name} queries", count + 1, dim),
        "key_weights": 1 + _numbers(f"{name} key weights", count + 1, dim) / 4,
    }
    sublayers = [lambda read, m=matrix: read @ m.T for matrix in tensors["matrices"]]
    reads = run(KIMI, tensors["embedding"], sublayers, list(tensors["queries"]), list(tensors["key_weights"]),
                sublayers_per_block=size, eps=EPS)  # fmt: skip
    tensors["reads"] = torch.stack(reads)
    about = {"name": name, "definition": KIMI.name, "eps": EPS, "num_sublayers": count, "sublayers_per_block": size}
    return about | {"members": [members(site, size) for site in range(count + 1)]}, tensors
