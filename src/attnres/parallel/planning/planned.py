"""One planned run: what was asked, the model, and the simulated steps; what all tables are made from."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnres.errors import ConfigError
from attnres.parallel.plan import Cache
from attnres.parallel.planning.divisions import check_tensor_ranks
from attnres.parallel.planning.models import as_stated, known_model, read_config
from attnres.parallel.planning.orders import Order, schedule_order
from attnres.parallel.planning.request import PlanRequest
from attnres.parallel.planning.sizes import ModelSize, built_size, stated_size
from attnres.parallel.planning.step import Arm, Overhead, as_prenorm, balanced_cuts, make_arm, overhead
from attnres.parallel.schedules import check_pipeline
from attnres.residual import BlockAttnRes, PreNorm, Strategy
from attnres.residual.bare import bare_residual

CACHES: dict[Cache, str] = {"all": "cache all", "received": "cache received", "off": "naive"}
"""Ways to cache, and what tables call them."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A planned run."""

    request: PlanRequest
    """What was asked."""
    strategy: Strategy
    """The residual strategy."""
    size: ModelSize
    """The model."""
    schedule: str
    """PyTorch's name of the schedule."""
    order: Order
    """In which ranks work."""
    base: Arm
    """The same with the plain residual."""
    arms: Mapping[Cache, Arm]
    """A simulated step for each way to cache."""

    @property
    def arm(self) -> Arm:
        """The step that was asked for."""
        return self.arms[self.request.cache]

    @property
    def overhead(self) -> Overhead:
        """What it costs over the plain residual."""
        return overhead(self.arm, self.base, self.order)


def plan_run(request: PlanRequest) -> Planned:
    """Settle what was left open, count the model, and simulate a step.

    Raises:
        ConfigError: The model is unknown, the config cannot be used, or layout, schedule and strategy do not fit the
            model or each other; one line says what is allowed.
        UnsupportedModelError: The family of the config is not supported.
    """
    name, shape, usual = _model(request)
    strategy = (request.residual or usual).with_read_scale("mean")
    size = _size(name, shape, strategy, request)
    _check_tensor(size, strategy, request.tensor)
    kind = check_pipeline(
        size.num_sublayers,
        ranks=request.pipeline,
        microbatches=request.microbatches,
        schedule=request.settled_schedule,
        virtual=request.virtual,
        cuts=request.cuts,
    )
    if request.balance:
        request = replace(request, cuts=balanced_cuts(size, request), balance=False)
    order = schedule_order(kind, ranks=request.pipeline, virtual=request.virtual, microbatches=request.microbatches)
    arms: dict[Cache, Arm] = {
        cache: make_arm(f"{strategy.label}, {title}", strategy, cache, size, order, kind.placement, request)
        for cache, title in CACHES.items()
    }
    base = make_arm("PreNorm", PreNorm(), "all", as_prenorm(size), order, kind.placement, request)
    return Planned(request=request, strategy=strategy, size=size, schedule=kind.name, order=order, base=base, arms=arms)


def _check_tensor(size: ModelSize, strategy: Strategy, ranks: int) -> None:
    check_tensor_ranks(size.widths, ranks)
    if ranks > 1 and strategy.crosses_tokens:
        raise ConfigError(
            f"tensor is {ranks} and {strategy.label} looks at other tokens, which other tensor ranks have; allowed: 1, "
            "or a strategy whose state is per token"
        )


def _model(request: PlanRequest) -> tuple[str, Any, Strategy]:
    if request.config is not None:
        shape = read_config(request.config)
        blocks = min(8, 2 * getattr(shape, "num_hidden_layers", 8))
        return str(request.config), shape, BlockAttnRes(num_blocks=blocks, remainder="balanced")
    assert request.model is not None  # a request has one of the two
    known = known_model(request.model)
    return request.model, known.shape() if callable(known.shape) else known.shape, known.residual


def _size(name: str, shape: Any, strategy: Strategy, request: PlanRequest) -> ModelSize:
    stated = as_stated(shape)
    if stated is None:
        return built_size(name, shape, strategy, request.context)
    with torch.device("meta"):
        residual = bare_residual(strategy, stated.num_sublayers, stated.dim)
    return stated_size(name, stated, [sum(p.numel() for p in site.parameters()) for site in residual.sites])
