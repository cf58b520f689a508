"""Small matrices of constant weights: how a write makes the tensors of a state from those before."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def rows(columns: int, entries: Sequence[Mapping[int, float]], like: Tensor) -> Tensor:
    """A matrix given by its entries that are not zero: ``[rows, columns, 1]``, in float32 (float64 for float64).

    Args:
        columns: Tensors of the state before a write, and the output, which comes last.
        entries: For each tensor of the state after it, weights by column.
        like: Gives dtype and device.
    """
    values = [[row.get(column, 0.0) for column in range(columns)] for row in entries]
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.tensor(values, dtype=dtype, device=like.device)[..., None]


def keep(count: int) -> list[Mapping[int, float]]:
    """Entries of `rows` that leave the first tensors as they are."""
    return [{index: 1.0} for index in range(count)]
