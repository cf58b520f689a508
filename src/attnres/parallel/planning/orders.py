"""The order in which each rank works through a step: that of PyTorch's own schedules, asked for without processes.

A schedule of `torch.distributed.pipelining` needs only numbers to decide its order, so it is made here on stand-ins for
stages. One is written down instead: what `Schedule1F1B` says of its order is not what it runs (its last rank would
begin with the second micro-batch), so its loop is restated; a test drives the real one and compares.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from torch.distributed.pipelining.schedules import get_schedule_class

from attnres.parallel.schedules import ScheduleKind

Work = Literal["R", "F", "B", "I", "W"]
"""Memory is made for what the hop brings; forward; whole backward; backward for the inputs; for the weights."""
WORDS: dict[str, Work] = {"RECV_F": "R", "F": "F", "B": "B", "I": "I", "W": "W"}
"""PyTorch's words for these."""


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of a rank."""

    stage: int
    """On which stage."""
    work: Work
    """What."""
    microbatch: int
    """For which micro-batch."""


Order = tuple[tuple[Action, ...], ...]
"""By rank, its actions in order."""


def schedule_order(kind: ScheduleKind, *, ranks: int, virtual: int, microbatches: int) -> Order:
    """The order of a schedule that goes with these numbers, see `attnres.parallel.schedules.check_pipeline`.

    Args:
        kind: The schedule.
        ranks: Ranks P.
        virtual: Stages V on each.
        microbatches: Micro-batches M of a step.

    Examples:
        >>> from attnres.parallel.schedules import schedule_kind
        >>> for actions in schedule_order(schedule_kind("1f1b"), ranks=2, virtual=1, microbatches=2):
        ...     print(*(f"{action.work}{action.microbatch}" for action in actions))
        F0 F1 B0 B1
        R0 F0 B0 R1 F1 B1
    """
    if kind.name == "1F1B":
        return tuple(_received(_one_forward_one_backward(rank, ranks, microbatches)) for rank in range(ranks))
    stages = [
        SimpleNamespace(group_size=ranks, num_stages=ranks * virtual, group_rank=0, stage_index=index, submod=None)
        for index in range(virtual)
    ]
    make: Any = get_schedule_class(kind.name)
    schedule = make(stages if kind.is_multi else stages[0], microbatches)
    if kind.is_multi:  # receives are started as early as the sender can send
        return tuple(_flat(schedule.pipeline_order_with_comms[rank]) for rank in range(ranks))
    return tuple(_received(_flat(schedule.pipeline_order[rank])) for rank in range(ranks))


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    ahead = min(microbatches, ranks - rank)
    actions = [Action(rank, "F", index) for index in range(ahead)]
    for index in range(microbatches):
        actions.append(Action(rank, "B", index))
        if index + ahead < microbatches:
            actions.append(Action(rank, "F", index + ahead))
    return tuple(actions)


def _flat(actions: Any) -> tuple[Action, ...]:
    """Without waits and bookkeeping; a forward and a backward that are written as one are done one after the other."""
    found: list[Action] = []
    for action in actions:
        for part in () if action is None else action.sub_actions or (action,):
            work = WORDS.get(part.computation_type.value)
            if work is not None:
                found.append(Action(part.stage_index, work, part.microbatch_index))
    return tuple(found)


def _received(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """With each receive right before the forward pass that waits for it."""
    found: list[Action] = []
    for action in actions:
        if action.work == "F" and action.stage > 0:
            found.append(Action(action.stage, "R", action.microbatch))
        found.append(action)
    return tuple(found)
