"""What crosses a cut between two sublayers: the tensors of the residual state there, each with a name.

A tensor that was in the state at an earlier cut has the same name here, so "what does the receiver lack" is a question
about names. Names are found by running the strategy once on one token and watching which tensors stay the same objects:
a state is immutable, so a source that is kept is kept as it is. That works for every strategy, and nothing has to be
declared twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attnres.residual import History, Strategy
from attnres.residual.bare import bare_residual

Kind = Literal["embedding", "block", "partial", "other"]
SOURCE_KINDS: frozenset[Kind] = frozenset({"embedding", "block"})
"""Finished sources, which several stages may read."""
EMBEDDING = "E"
"""Key of the token embedding where that is a source of its own."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One tensor of a state."""

    key: str
    """The same for the same tensor at every cut of one model."""
    kind: Kind
    """``"embedding"`` or ``"block"``: a finished source. ``"partial"``: the running block's sum. ``"other"``: a state
    of another kind, or what a variant keeps beside its sources."""
    width: int
    """Numbers per token: D, or more for several streams in one tensor."""

    @property
    def is_source(self) -> bool:
        """Whether it is a finished source, which several stages may read."""
        return self.kind in SOURCE_KINDS


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The state at a cut, as a row of tensors."""

    cut: int
    """Number of sublayers before the cut."""
    leaves: tuple[Leaf, ...]
    """In the order in which the state is taken apart; one that is in it twice is here once."""
    places: tuple[int, ...]
    """For each place in the state, which of the leaves is there."""
    spec: Any = field(compare=False)
    """How to put it together again."""

    def flatten(self, state: Any) -> tuple[Tensor, ...]:
        """The tensors of a state at this cut. Results of phase 1 do not cross it."""
        tensors, _ = pytree.tree_flatten(suspend(state))
        return tuple(dict(zip(self.places, tensors, strict=True)).values())

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """The state that these tensors are of."""
        return pytree.tree_unflatten([tensors[leaf] for leaf in self.places], self.spec)


def suspend(state: Any) -> Any:
    """A state without what phase 1 has ready: its reads belong to the sites of one stage."""
    if not isinstance(state, History) or state.ahead is None:
        return state
    return History(state.finished, state.partial, None, state.last_read, state.extra)


@torch.no_grad()
def layouts(strategy: Strategy, num_sublayers: int, dim: int) -> tuple[Layout, ...]:
    """The state at every cut: entry ``k`` has ``k`` sublayers before it.

    Args:
        strategy: Any residual strategy.
        num_sublayers: Depth.
        dim: Width D; only what the strategy asks of a width matters.

    Raises:
        ConfigError: The strategy does not fit depth or width.

    Examples:
        >>> from attnres.residual import BlockAttnRes
        >>> [leaf.key for leaf in layouts(BlockAttnRes(sublayers_per_block=2), 4, 8)[3].leaves]
        ['E', 'b2', 'partial3']
    """
    with torch.device("meta"):  # which tensors stay the same does not depend on any value
        residual = bare_residual(strategy, num_sublayers, dim)
        state = residual.start(torch.zeros(1, 1, dim))
        kept: list[Any] = [state]  # so that no two of the tensors have one id
        keys: dict[int, str] = {}
        found = [_layout(state, 0, keys)]
        for site in range(num_sublayers):
            state = residual.write(state, site, torch.zeros(1, 1, dim))
            kept.append(state)
            found.append(_layout(state, site + 1, keys))
    return tuple(found)


def _layout(state: Any, cut: int, keys: dict[int, str]) -> Layout:
    tensors, spec = pytree.tree_flatten(suspend(state))
    kinds = _kinds(state)
    named: dict[int, Leaf] = {}
    for place, tensor in enumerate(tensors):
        kind = kinds.get(id(tensor), "other")
        if id(tensor) not in keys:
            keys[id(tensor)] = _new_key(kind, cut, place, set(keys.values()))
        key = keys[id(tensor)]
        named.setdefault(
            id(tensor), Leaf(key=key, kind="embedding" if key == EMBEDDING else kind, width=tensor.numel())
        )
    order = list(named)
    places = tuple(order.index(id(tensor)) for tensor in tensors)
    return Layout(cut=cut, leaves=tuple(named.values()), places=places, spec=spec)


def _kinds(state: Any) -> Mapping[int, Kind]:
    if not isinstance(state, History):
        return {}
    kinds: dict[int, Kind] = {id(source): "block" for source in state.finished}
    if state.partial is not None:
        kinds[id(state.partial)] = "partial"
    return kinds


def _new_key(kind: Kind, cut: int, place: int, taken: set[str]) -> str:
    if kind == "block" and cut == 0:
        return EMBEDDING
    name = {"block": f"b{cut}", "partial": f"partial{cut}"}.get(kind, f"state{cut}")
    return name if name not in taken else f"{name}.{place}"
