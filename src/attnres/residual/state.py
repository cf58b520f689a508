"""The immutable state that flows through a model in place of the hidden-state tensor.

Nothing is mutated and nothing is hidden: activation checkpointing, `torch.compile` and a pipeline can cut the model
anywhere and pass the state on. All kinds are pytrees, so utilities that look for tensors in arguments find them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attnres.ops import PartialSoftmax


@final
@dataclass(frozen=True)
class RunningSum:
    """State of the plain residual and its relatives: one tensor, a weighted sum of everything so far."""

    hidden: Tensor
    """``[*batch, dim]``."""


@final
@dataclass(frozen=True)
class Streams:
    """State of the methods with several residual streams."""

    hidden: Tensor
    """``[*batch, streams, dim]``."""


@final
@dataclass(frozen=True)
class Ahead:
    """Phase 1 of the running block: what its reads take from the sources that were finished when it began."""

    reads: tuple[PartialSoftmax, ...]
    """Of the reads still to come, in the order of their sites."""
    carriers: tuple[Tensor, ...]
    """One per far source: what its gradient travels on. None where no gradient is wanted."""
    far: int
    """How many of the finished sources phase 1 covers; the others, and the partial sum, are near."""
    first: int
    """Index of the site that the first of the reads belongs to."""
    deferred: bool
    """Whether phase 1 leaves the forward pass to each read, and only the backward pass runs once per block."""

    def of(self, site: int) -> PartialSoftmax | None:
        """Phase 1 of the read at a site; None where it is not among them."""
        return self.reads[site - self.first] if self.first <= site < self.first + len(self.reads) else None

    def after(self, site: int) -> "Ahead":
        """What is left when a site has been written."""
        done = min(max(site + 1 - self.first, 0), len(self.reads))
        return Ahead(self.reads[done:], self.carriers, self.far, self.first + done, self.deferred)


@final
@dataclass(frozen=True)
class History:
    """State of depth attention: the finished sources, and the partial sum of the running block."""

    finished: tuple[Tensor, ...]
    """Sources ``[*batch, dim]``, oldest first; entry 0 is the token embedding."""
    partial: Tensor | None = None
    """Sum of the current block's outputs so far; absent (never zeros) at a block's first site."""
    ahead: Ahead | None = None
    """Phase 1 of the running block, where its reads are in two phases."""
    last_read: Tensor | None = None
    """What the site before this one read, where a query is made of that."""
    extra: tuple[Tensor, ...] = ()
    """What a variant keeps beside its sources: further sums, streams, gates."""

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """What a read sees: the finished sources, then the partial sum if there is one."""
        return self.finished if self.partial is None else (*self.finished, self.partial)


State = RunningSum | Streams | History

for _state, _fields in (
    (RunningSum, ["hidden"]),
    (Streams, ["hidden"]),
    (History, ["finished", "partial", "ahead", "last_read", "extra"]),
):
    pytree.register_dataclass(_state, field_names=_fields)


def _flatten_ahead(ahead: Ahead) -> tuple[list[Any], tuple[int, int, bool]]:
    return [ahead.reads, ahead.carriers], (ahead.far, ahead.first, ahead.deferred)


def _unflatten_ahead(children: Any, context: tuple[int, int, bool]) -> Ahead:
    reads, carriers = children
    return Ahead(reads, carriers, *context)


pytree.register_pytree_node(
    Ahead, _flatten_ahead, _unflatten_ahead, serialized_type_name="attnres.residual.state.Ahead"
)


def storage_bytes(given: Iterable[Tensor]) -> int:
    """Bytes of the memory behind some tensors, each piece once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in given}
    return sum(storages.values())


def tensors(state: State) -> list[torch.Tensor]:
    """The tensors of a state, oldest source first."""
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
