"""What each rank of a mesh would hold, from a run's config alone: no process is started and nothing is allocated."""

from dataclasses import dataclass
from typing import Any

import torch

from attnres.experiments.models import build_model
from attnres.experiments.run import check_fits
from attnres.models.convert import converted_base
from attnres.models.install import family_of_converted
from attnres.parallel.config import ParallelConfig
from attnres.parallel.part import StagePart
from attnres.parallel.plan import PipelinePlan, plan_pipeline
from attnres.parallel.planning.communication import carried
from attnres.parallel.schedules import schedule_kind
from attnres.parallel.tensor import divided_parameters
from attnres.train import RunConfig


@dataclass(frozen=True, kw_only=True)
class StageShare:
    """One stage on one rank."""

    stage: int
    """Index in the pipeline."""
    sublayers: tuple[int, int]
    """First and last one."""
    layers: tuple[int, int]
    """First and last decoder layer that has one of them; a layer that is cut is in two stages."""
    parameters: int
    """Parameters that the rank has of the stage, with embedding, final norm and head where they are in it."""
    receives: str
    """What comes over the hop to it, forward, by keys: ``E`` is the embedding, ``b4`` the block that ended after four
    sublayers. Its gradients go back the same way."""


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """Ranks that hold as much as each other: all of one place in the pipeline."""

    ranks: tuple[int, int]
    """First and last one, as torchrun counts."""
    stages: tuple[StageShare, ...]
    """Their stages, ascending."""

    @property
    def parameters(self) -> int:
        """Parameters on each of them."""
        return sum(stage.parameters for stage in self.stages)


def lay_out(config: RunConfig) -> tuple[RankShare, ...]:
    """Say what each rank of a run's mesh would hold.

    Args:
        config: The run.

    Returns:
        One entry for each place in the pipeline, in order.

    Raises:
        ConfigError: The mesh does not fit the layers, the heads or the passes of a step.
        UnsupportedModelError: The model cannot be cut.
    """
    check_fits(config)
    layout = config.parallel
    with torch.device("meta"):
        model = build_model(config, weights=False)
    plan = _plan(model, layout)
    parts = divided_parameters(model, layout.tensor) if layout.tensor > 1 else ()
    divided = frozenset(map(id, parts))
    beside = layout.data * layout.tensor
    return tuple(
        RankShare(
            ranks=(place * beside, (place + 1) * beside - 1),
            stages=tuple(_stage(model, plan, stage, layout, divided) for stage in plan.stages_of(place)),
        )
        for place in range(layout.pipeline)
    )


def _plan(model: Any, layout: ParallelConfig) -> PipelinePlan:
    residual = converted_base(model).residual
    return plan_pipeline(
        residual.strategy,
        residual.num_sublayers,
        model.get_input_embeddings().weight.shape[-1],
        ranks=layout.pipeline,
        virtual=layout.virtual,
        cuts=layout.cuts,
        cache=layout.cache,
        placement=schedule_kind(layout.settled_schedule).placement,
    )


def _stage(model: Any, plan: PipelinePlan, stage: int, layout: ParallelConfig, divided: frozenset[int]) -> StageShare:
    first, stop = plan.span(stage)
    base = converted_base(model)
    layers = getattr(base, family_of_converted(base).layers)
    own = [index for index, layer in enumerate(layers) if any(first <= place < stop for place in layer.places)]
    part = model if plan.num_stages == 1 else StagePart(model, plan, stage)
    sizes = [value.numel() // (layout.tensor if id(value) in divided else 1) for value in part.parameters()]
    return StageShare(
        stage=stage,
        sublayers=(first, stop - 1),
        layers=(own[0], own[-1]),
        parameters=-(-sum(sizes) // layout.data) if layout.is_sharded else sum(sizes),
        receives=_received(plan, stage),
    )


def _received(plan: PipelinePlan, stage: int) -> str:
    if stage == 0:
        return "token ids"
    hop = plan.hops[stage - 1]
    return "nothing: the stage before is on the same rank" if hop.is_local else carried(hop)
