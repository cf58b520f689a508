"""Inputs of the checks, from fixed seeds, and what the definition makes of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from attnres.testing.adapter import Adapter
from attnres.testing.definition import Definition

EPS = 1e-5

VALUE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""Largest relative error of a right value, by dtype of the sources."""
GRADIENT = {torch.float64: 1e-11, torch.float32: 4e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Largest relative error of a right gradient."""
HALF = (torch.bfloat16, torch.float16)
"""The dtypes of 16 bits."""
DIAGNOSIS = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
"""How far a number read back from the result, such as a weight, may be from the right one."""


@final
@dataclass(frozen=True)
class Inputs:
    """One read's arguments."""

    sources: list[Tensor]
    query: Tensor
    key_weight: Tensor | None
    eps: float

    def call(self, adapter: Adapter) -> Tensor:
        """The implementation's read."""
        return adapter.read(self.sources, self.query, self.key_weight, eps=self.eps)

    def exact(self, definition: Definition) -> Tensor:
        """The definition's read of the same numbers, in float64."""
        return definition.read(self.sources, self.query, self.key_weight, eps=self.eps)

    def leaves(self) -> "Inputs":
        """Copies that gradients can be taken of."""
        query, key_weight = self.query.detach().clone().requires_grad_(), self.key_weight
        if key_weight is not None:
            key_weight = key_weight.detach().clone().requires_grad_()
        return Inputs([leaf(source) for source in self.sources], query, key_weight, self.eps)

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same numbers in another dtype."""
        weight = None if self.key_weight is None else self.key_weight.to(dtype)
        return Inputs([source.to(dtype) for source in self.sources], self.query.to(dtype), weight, self.eps)

    @property
    def vectors(self) -> list[Tensor]:
        """Query and, where there is one, key weight."""
        return [self.query] if self.key_weight is None else [self.query, self.key_weight]


def allowed(dtype: torch.dtype, factor: float, limits: dict[torch.dtype, float] = VALUE) -> float:
    """Largest relative error after several steps, each of which rounds to 16 bits if the dtype has no more."""
    return DIAGNOSIS[dtype] if dtype in HALF else factor * limits[dtype]


def leaf(tensor: Tensor) -> Tensor:
    """A copy that gradients can be taken of."""
    return tensor.detach().clone().requires_grad_()


def random_inputs(
    adapter: Adapter,
    count: int,
    dim: int,
    batch: Sequence[int] = (6,),
    *,
    dtype: torch.dtype | None = None,
    vector_dtype: torch.dtype | None = None,
    loudness: float = 1.0,
    seed: int = 0,
) -> Inputs:
    """Normal sources of different size, a query that makes scores of a few units, key weights around one.

    Raises:
        NotApplicable: The read lies beyond a declared limit.
    """
    dtype = dtype or adapter.precise
    adapter.check_limits(count, dim, dtype)
    normal = normals(seed, adapter.device)
    sources = [(normal(*batch, dim) * loudness * (1 + at % 3)).to(dtype) for at in range(count)]
    # scores of a few units for the definition's own scale
    query = normal(dim) * 1.5 * dim**-0.5 / adapter.definition.scale(dim)
    weight = 1 + 0.3 * normal(dim) if adapter.takes_key_weight else None
    kind = vector_dtype or adapter.vector_dtype(dtype)
    eps = adapter.fixed_eps or EPS
    return Inputs(sources, query.to(kind), None if weight is None else weight.to(kind), eps)


def normals(seed: int, device: str) -> Callable[..., Tensor]:
    """A source of float64 normals that are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
