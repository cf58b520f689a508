"""Which tensors each hop of a pipeline carries: decided here, before anything runs, and nowhere else.

A stage is a run of consecutive sublayers; a hop is the way from one stage to the next. What a hop sends is the state at
the cut, less what the receiving rank has already: with the cross-stage cache a rank keeps what it was sent, or made
itself, for an earlier one of its stages (paper, section 4.1). The run, the byte ledger and the planner all go by this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from attnres.errors import ConfigError
from attnres.parallel.layout import Layout, Leaf, layouts
from attnres.residual import Strategy

Cache = Literal["all", "received", "off"]
"""``"all"``: a rank keeps what it was sent and what it made. ``"received"``: only what it was sent (and the embedding),
the paper's count. ``"off"``: every hop sends the whole state."""
Placement = Literal["loop", "v"]
"""``"loop"``: stage s is on rank s mod P. ``"v"``: two stages a rank, the second half in reverse order."""


@dataclass(frozen=True, kw_only=True)
class Hop:
    """The way from one stage to the next."""

    stage: int
    """The receiving stage; the sending one is the stage before."""
    sender: int
    """Rank in the pipeline that sends."""
    receiver: int
    """Rank in the pipeline that receives."""
    leaves: tuple[Leaf, ...]
    """What is sent forward; their gradients come back the same way."""

    @property
    def is_local(self) -> bool:
        """Whether both stages are on one rank, so that tensors are handed over and nothing is sent."""
        return self.sender == self.receiver

    @property
    def sources(self) -> int:
        """Finished sources sent, the embedding among them."""
        return sum(leaf.is_source for leaf in self.leaves)

    @property
    def blocks(self) -> int:
        """Finished block sums sent, without the embedding: what the paper's formulas count."""
        return sum(leaf.kind == "block" for leaf in self.leaves)


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """The stages of a pipeline and what goes between them."""

    num_sublayers: int
    """Depth of the model."""
    cuts: tuple[int, ...]
    """Sublayers before each cut, ascending; one less than there are stages."""
    ranks: tuple[int, ...]
    """Rank of each stage."""
    cache: Cache
    """What ranks keep."""
    states: tuple[Layout, ...]
    """The state at the start of each stage, and last at the end of the model."""
    hops: tuple[Hop, ...]
    """Hop ``s - 1`` leads to stage ``s``."""
    kept: tuple[frozenset[str], ...]
    """By stage, keys of what its rank keeps from it for later stages: brought by its hop, or made in it."""

    @property
    def num_stages(self) -> int:
        """Stages C of the whole pipeline."""
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        """Ranks P."""
        return max(self.ranks) + 1

    def span(self, stage: int) -> tuple[int, int]:
        """First sublayer of a stage, and one past its last."""
        bounds = (0, *self.cuts, self.num_sublayers)
        return bounds[stage], bounds[stage + 1]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages on a rank, ascending."""
        return tuple(stage for stage, place in enumerate(self.ranks) if place == rank)

    def brought(self, stage: int) -> tuple[Leaf, ...]:
        """What the hop to a stage carries; nothing for the first."""
        return self.hops[stage - 1].leaves if stage else ()

    def incoming(self, stage: int) -> Layout:
        """The state at the start of a stage."""
        return self.states[stage]

    def outgoing(self, stage: int) -> Layout:
        """The state at the end of a stage."""
        return self.states[stage + 1]


def plan_pipeline(
    strategy: Strategy,
    num_sublayers: int,
    dim: int,
    *,
    ranks: int,
    virtual: int = 1,
    cuts: Sequence[int] | None = None,
    cache: Cache = "all",
    placement: Placement = "loop",
) -> PipelinePlan:
    """Decide what each hop carries.

    Args:
        strategy: The residual strategy.
        num_sublayers: Depth, attention and MLP counted separately.
        dim: Width D of the model.
        ranks: Ranks P of the pipeline.
        virtual: Stages V on each rank.
        cuts: Sublayers before each cut; None spreads the sublayers evenly.
        cache: What ranks keep between their stages.
        placement: Which rank has which stage.

    Raises:
        ConfigError: There are more stages than sublayers, cuts are out of order or of the wrong number, or a value is
            not allowed.

    Examples:
        >>> from attnres.residual import BlockAttnRes
        >>> plan = plan_pipeline(BlockAttnRes(sublayers_per_block=2), 16, 8, ranks=4, virtual=2, cache="received")
        >>> [hop.blocks for hop in plan.hops]
        [1, 2, 3, 4, 4, 4, 4]
    """
    for name, value, allowed in (("cache", cache, get_args(Cache)), ("placement", placement, get_args(Placement))):
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
    places = stage_ranks(ranks, virtual, placement)
    settled = check_cuts(cuts, num_sublayers, len(places))
    at_every_cut = layouts(strategy, num_sublayers, dim)
    states = tuple(at_every_cut[cut] for cut in (0, *settled, num_sublayers))
    hops, kept = _hops(states, places, cache)
    return PipelinePlan(
        num_sublayers=num_sublayers, cuts=settled, ranks=places, cache=cache, states=states, hops=hops, kept=kept
    )


def stage_ranks(ranks: int, virtual: int, placement: Placement = "loop") -> tuple[int, ...]:
    """The rank of each stage.

    Raises:
        ConfigError: A number is below 1, or a V does not have two stages on each rank.
    """
    for name, value in (("pipeline ranks", ranks), ("virtual", virtual)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; allowed: 1 or more")
    if placement == "loop":
        return tuple(stage % ranks for stage in range(ranks * virtual))
    if virtual != 2:
        raise ConfigError(f"virtual is {virtual}; allowed: 2, as a V-shaped schedule has two stages on each rank")
    return (*range(ranks), *reversed(range(ranks)))


def check_cuts(cuts: Sequence[int] | None, num_sublayers: int, num_stages: int) -> tuple[int, ...]:
    """The cuts, spread evenly where none are given.

    Raises:
        ConfigError: A stage would have no sublayer, or they are out of order or of the wrong number.
    """
    if num_stages > num_sublayers:
        raise ConfigError(
            f"the pipeline has {num_stages} stages, but the model has {num_sublayers} sublayers; allowed: at most one "
            "stage for each sublayer"
        )
    if cuts is None:
        return tuple(stage * num_sublayers // num_stages for stage in range(1, num_stages))
    if len(cuts) != num_stages - 1:
        raise ConfigError(f"cuts are {list(cuts)}; allowed: {num_stages - 1} of them, for {num_stages} stages")
    if max(cuts, default=0) >= num_sublayers:
        raise ConfigError(f"cuts are {list(cuts)}; allowed: below {num_sublayers}, the number of sublayers")
    bounds = [0, *cuts, num_sublayers]
    for before, after in pairwise(bounds):
        if after <= before:
            raise ConfigError(
                f"cuts are {list(cuts)}, which leaves the stage from {before} to {after} without a sublayer; allowed: "
                f"ascending numbers from 1 to {num_sublayers - 1}"
            )
    return tuple(cuts)


def _hops(
    states: Sequence[Layout], ranks: Sequence[int], cache: Cache
) -> tuple[tuple[Hop, ...], tuple[frozenset[str], ...]]:
    """Go through the stages in order and note what each rank has by then."""
    has: dict[int, set[str]] = {rank: set() for rank in ranks}
    hops: list[Hop] = []
    cached: list[set[str]] = []  # by stage, what it takes from its rank
    may_keep: list[set[str]] = []  # by stage, what it could give to its rank
    for stage, rank in enumerate(ranks):
        leaves = states[stage].leaves if stage else ()
        brought = tuple(leaf for leaf in leaves if leaf.key not in has[rank])
        cached.append({leaf.key for leaf in leaves} - {leaf.key for leaf in brought})
        if stage:
            hops.append(Hop(stage=stage, sender=ranks[stage - 1], receiver=rank, leaves=brought))
        may_keep.append(_may_keep(states, stage, brought, cache))
        has[rank] |= may_keep[stage]
    kept = [
        frozenset(
            keys & set().union(*(cached[later] for later in range(stage + 1, len(ranks)) if ranks[later] == rank))
        )
        for stage, (rank, keys) in enumerate(zip(ranks, may_keep, strict=True))
    ]
    return tuple(hops), tuple(kept)


def _may_keep(states: Sequence[Layout], stage: int, brought: Sequence[Leaf], cache: Cache) -> set[str]:
    if cache == "off":
        return set()
    arrived = {leaf.key for leaf in brought}
    after = states[stage + 1].leaves
    if cache == "received":  # the embedding comes to the first rank from outside
        return arrived | {leaf.key for leaf in after if leaf.kind == "embedding" and stage == 0}
    known = {leaf.key for leaf in states[stage].leaves} if stage else set()
    return arrived | {leaf.key for leaf in after if leaf.key not in known}
