"""What a strategy costs, found by running it: parameters, size of the state, and traffic per token.

Traffic is counted as if every step were one fused kernel: a read takes each tensor that has a weight in it once and
writes its result, a write takes what its new tensors are made of once and writes these. What only passes along costs
nothing. So the plain residual moves 3 tensors a sublayer (paper, Table 1), and the numbers are floors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnres.residual.bare import bare_residual
from attnres.residual.residual import OUTPUT, Residual
from attnres.residual.state import Streams, tensors
from attnres.residual.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a strategy at a depth and width."""

    parameters: int
    """Of all sites."""
    state: float
    """The most that the state holds between two sublayers, in tensors of D numbers per token."""
    moved: float
    """Read and written for the residual path per token and sublayer, in tensors of D numbers; mean over the depth."""


@torch.no_grad()
def costs(strategy: Strategy, num_sublayers: int, dim: int) -> Costs:
    """Run a strategy on one token and count.

    Args:
        strategy: Any residual strategy.
        num_sublayers: Depth.
        dim: Width D.

    Raises:
        ConfigError: The strategy does not fit depth or width.
    """
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        residual = bare_residual(strategy, num_sublayers, dim)
        for parameter in residual.parameters():  # away from zeros, which would look like weights that are not there
            parameter.add_(1e-3 * torch.randn_like(parameter))
        state = residual.start(torch.randn(1, dim))
        largest, moved = _size(state, dim), 0.0
        for index in range(num_sublayers):
            moved += _read_traffic(residual, state, index, dim)
            output = torch.randn(1, dim)
            written = residual.write(state, index, output)
            moved += _write_traffic(residual, state, written, index, output, dim)
            state = written
            largest = max(largest, _size(state, dim))
        moved += _read_traffic(residual, state, OUTPUT, dim)
    return Costs(
        parameters=sum(parameter.numel() for parameter in residual.parameters()),
        state=largest,
        moved=moved / num_sublayers,
    )


def _read_traffic(residual: Residual, state: Any, site: int, dim: int) -> float:
    value = residual.read(state, site)
    parts = _parts(state)
    if _place(value) in {_place(part) for part in parts}:
        return 0.0
    if residual.strategy.scores_every_tensor:
        return (sum(part.numel() for part in parts) + value.numel()) / dim
    weights = residual.strategy.read_weights(state, residual.site(site))
    return _taken(parts, weights, dim) + value.numel() / dim


def _write_traffic(residual: Residual, state: Any, written: Any, site: int, output: Tensor, dim: int) -> float:
    weights = residual.strategy.write_weights(state, residual.site(site), output)
    before = [*_parts(state), output]
    known = {_place(part) for part in before}
    new = [row for row, part in enumerate(_parts(written)) if _place(part) not in known]
    made = sum(_parts(written)[row].numel() for row in new) / dim
    rows = [row for row in new if row < weights.shape[-3]]
    return made + (_taken(before, weights[..., rows, :, :], dim) if rows else 0.0)


def _taken(parts: Sequence[Tensor], weights: Tensor, dim: int) -> float:
    """Size of the tensors that have a weight (second last axis but channels) in any row."""
    used = (weights != 0).movedim(-2, -1).flatten(0, -2).any(0)
    return sum(part.numel() for part, taken in zip(parts, used.tolist(), strict=False) if taken) / dim


def _parts(state: Any) -> list[Tensor]:
    return list(state.hidden.unbind(-2)) if isinstance(state, Streams) else tensors(state)


def _place(part: Tensor) -> tuple[int, int]:
    return part.untyped_storage().data_ptr(), int(part.storage_offset())


def _size(state: Any, dim: int) -> float:
    return sum(part.numel() for part in tensors(state)) / dim
