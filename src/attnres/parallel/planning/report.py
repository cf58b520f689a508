"""The whole plan of a run: every number of the planner in tables, each with its formula."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from attnres.parallel.planning.planned import Planned, plan_run
from attnres.parallel.planning.request import PlanRequest
from attnres.parallel.planning.step import Arm
from attnres.parallel.planning.table import Table
from attnres.parallel.planning.tables_layout import communication_table, hops_table, prefill_table, training_table
from attnres.parallel.planning.tables_model import flops_table, io_table, parameters_table, summary_table, traffic_table
from attnres.parallel.planning.tables_step import assumptions_table, overhead_table, stages_table, step_table

FORMAT = 1
"""Of the JSON; raised when a name in it changes its meaning."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan, for people and as JSON."""

    planned: Planned
    """The run and its simulated steps."""
    tables: tuple[Table, ...]
    """Everything in order."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, without the simulated events."""
        request = dataclasses.asdict(self.planned.request)
        settled = {
            "residual": self.planned.strategy.label,
            "schedule": self.planned.schedule,
            "cuts": list(self.planned.arm.plan.cuts),
            "config": None if self.planned.request.config is None else str(self.planned.request.config),
        }
        return {
            "format": FORMAT,
            "model": self.planned.size.name,
            "request": {**request, **settled},
            "tables": {table.key: table.to_dict() for table in self.tables},
        }

    def timeline(self) -> dict[str, Any]:
        """The simulated steps, event by event, in seconds from their beginning."""
        return {name: _timeline(arm) for name, arm in {"prenorm": self.planned.base, **self.planned.arms}.items()}


def make_report(request: PlanRequest) -> PlanReport:
    """Plan a run and put it in tables.

    Raises:
        ConfigError: See `attnres.parallel.planning.planned.plan_run`.
        UnsupportedModelError: The family of the config is not supported.
    """
    planned = plan_run(request)
    makers = [summary_table, parameters_table, flops_table, io_table, traffic_table]
    makers += [hops_table, communication_table] if request.pipeline > 1 else []
    makers += [training_table, prefill_table, stages_table, step_table, overhead_table, assumptions_table]
    return PlanReport(planned=planned, tables=tuple(make(planned) for make in makers))


def _timeline(arm: Arm) -> dict[str, Any]:
    return {
        "seconds": arm.timeline.seconds,
        "bubble_fraction": arm.timeline.bubble_fraction,
        "stages": [dataclasses.asdict(time) for time in arm.times],
        "events": [
            {"rank": event.rank, **dataclasses.asdict(event.action), "start": event.start, "end": event.end}
            for event in arm.timeline.events
        ],
        "transfers": [dataclasses.asdict(transfer) for transfer in arm.timeline.transfers],
    }
