"""PyTorch's pipeline schedules by name, and what each asks of a mesh; checked before any process talks to another.

PyTorch's own module is imported where it is used: it takes a second, and most of what is here are words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnres.errors import ConfigError
from attnres.parallel.plan import Placement, check_cuts, stage_ranks


@dataclass(frozen=True, kw_only=True)
class ScheduleKind:
    """A schedule of `torch.distributed.pipelining`."""

    name: str
    """Its name there."""
    placement: Placement = "loop"
    """Which rank has which stage."""
    splits_backward: bool = False
    """Whether the gradients of weights are computed apart from those of inputs."""

    @property
    def is_multi(self) -> bool:
        """Whether a rank may have several stages."""
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        return issubclass(get_schedule_class(self.name), PipelineScheduleMulti)


SCHEDULES = {
    "gpipe": ScheduleKind(name="GPipe"),
    "1f1b": ScheduleKind(name="1F1B"),
    "loopedbfs": ScheduleKind(name="LoopedBFS"),
    "interleaved1f1b": ScheduleKind(name="Interleaved1F1B"),
    "interleavedzerobubble": ScheduleKind(name="InterleavedZeroBubble", splits_backward=True),
    "zbv": ScheduleKind(name="ZBVZeroBubble", placement="v", splits_backward=True),
    "dualpipev": ScheduleKind(name="DualPipeV", placement="v", splits_backward=True),
}
"""By the word for it on a command line."""


def schedule_kind(name: str) -> ScheduleKind:
    """A schedule by name.

    Raises:
        ConfigError: There is no such schedule.
    """
    try:
        return SCHEDULES[name.lower()]
    except (KeyError, AttributeError):
        raise ConfigError(f"schedule is {name!r}; allowed: {', '.join(SCHEDULES)}") from None


def check_pipeline(
    num_sublayers: int,
    *,
    ranks: int,
    microbatches: int,
    schedule: str = "1f1b",
    virtual: int = 1,
    cuts: Sequence[int] | None = None,
) -> ScheduleKind:
    """Raise unless a pipeline can run as asked for.

    Args:
        num_sublayers: Depth of the model.
        ranks: Ranks P.
        microbatches: Micro-batches M of a step.
        schedule: Name, see `SCHEDULES`.
        virtual: Stages V on each rank.
        cuts: Sublayers before each cut; None spreads them evenly.

    Raises:
        ConfigError: It cannot; the message has what would fit.
    """
    kind = schedule_kind(schedule)
    for name, value in (("microbatches", microbatches), ("virtual", virtual), *(("a cut", cut) for cut in cuts or ())):
        if not isinstance(value, int):
            raise ConfigError(f"{name} is {value!r}; allowed: a whole number")
    if microbatches < 1:
        raise ConfigError(f"microbatches is {microbatches}; allowed: 1 or more")
    if not kind.is_multi and virtual != 1:
        several = ", ".join(name for name, other in SCHEDULES.items() if other.is_multi)
        raise ConfigError(
            f"virtual is {virtual} with the schedule {schedule}, which has one stage on each rank; allowed: 1, or "
            f"one of the schedules {several}"
        )
    check_cuts(cuts, num_sublayers, len(stage_ranks(ranks, virtual, kind.placement)))
    _check_microbatches(kind, ranks, microbatches, schedule)
    return kind


def _check_microbatches(kind: ScheduleKind, ranks: int, microbatches: int, schedule: str) -> None:
    least = {"1F1B": ranks, "DualPipeV": 2 * ranks}.get(kind.name, 1)
    if microbatches < least:
        raise ConfigError(
            f"micro-batches are {microbatches}, too few for the schedule {schedule} on {ranks} ranks; allowed: {least} "
            "or more (or the schedule gpipe)"
        )
    rounds = max(1, microbatches // ranks)
    if kind.name in ("Interleaved1F1B", "InterleavedZeroBubble") and microbatches % rounds:
        fitting = [count for count in range(1, 2 * microbatches) if count % max(1, count // ranks) == 0]
        near = sorted(fitting, key=lambda count: abs(count - microbatches))[:2]
        raise ConfigError(
            f"{microbatches} micro-batches do not fit the schedule {schedule} on {ranks} ranks, which takes them in "
            f"{rounds} equal rounds; allowed: for example {' or '.join(map(str, sorted(near)))}"
        )


def build_schedule(kind: ScheduleKind, stages: Sequence[Any], microbatches: int, loss: Any) -> Any:
    """The schedule over the stages of this rank. Losses come as shares of the mean, so gradients need no scaling."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    made: Any = get_schedule_class(kind.name)
    return made(list(stages) if kind.is_multi else stages[0], microbatches, loss_fn=loss, scale_grads=False)
