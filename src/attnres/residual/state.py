"""The immutable state that flows through a model in place of the hidden-state tensor.

Nothing is mutated and nothing is hidden: activation checkpointing, `torch.compile` and a pipeline can cut the model
anywhere and pass the state on. Both kinds are pytrees, so utilities that look for tensors in arguments find them.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@final
@dataclass(frozen=True)
class RunningSum:
    """State of the plain residual: one tensor, the sum of everything so far."""

    hidden: Tensor
    """``[*batch, dim]``."""


@final
@dataclass(frozen=True)
class History:
    """State of depth attention: the finished sources, and the partial sum of the running block."""

    finished: tuple[Tensor, ...]
    """Sources ``[*batch, dim]``, oldest first; entry 0 is the token embedding."""
    partial: Tensor | None = None
    """Sum of the current block's outputs so far; absent (never zeros) at a block's first site."""

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """What a read sees: the finished sources, then the partial sum if there is one."""
        return self.finished if self.partial is None else (*self.finished, self.partial)


State = RunningSum | History

for _state, _fields in ((RunningSum, ["hidden"]), (History, ["finished", "partial"])):
    pytree.register_dataclass(_state, field_names=_fields)


def tensors(state: State) -> list[torch.Tensor]:
    """The tensors of a state, oldest source first."""
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
