"""A step of a pipeline as events: who works when, what waits for whom, and how much of the time that takes.

Every rank works through its schedule in order. A piece of work starts when the rank is free and its input is there;
what it puts out goes to the next stage over the link between the two ranks, of which there is one for each pair and
direction. A link sends one thing after another and the ranks work meanwhile, so a transfer costs time only where
somebody waits for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnres.errors import ConfigError
from attnres.parallel.planning.orders import Action, Order, Work


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Seconds of work on one micro-batch of a stage."""

    forward: float
    """Forward."""
    backward_inputs: float
    """Backward for the inputs, with the second forward pass where activations are recomputed."""
    backward_weights: float
    """Backward for the weights."""

    def of(self, work: Work) -> float:
        """Seconds of one action."""
        if work == "B":
            return self.backward_inputs + self.backward_weights
        return {"R": 0.0, "F": self.forward, "I": self.backward_inputs, "W": self.backward_weights}[work]


@dataclass(frozen=True, kw_only=True)
class HopTime:
    """Seconds of one transfer between two stages of different ranks."""

    occupied: float
    """How long the link is busy: bytes by bandwidth."""
    latency: float = 0.0
    """How much later the last byte arrives."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One piece of work as it was done."""

    rank: int
    """By whom."""
    action: Action
    """What."""
    start: float
    """Seconds from the beginning of the step."""
    end: float
    """The same."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One transfer as it was done."""

    sender: int
    """Rank that sent."""
    receiver: int
    """Rank that received."""
    stage: int
    """Whose input it is."""
    direction: str
    """``"forward"`` or ``"backward"``."""
    microbatch: int
    """Of which micro-batch."""
    start: float
    """When the link began."""
    end: float
    """When it had arrived."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A simulated step."""

    events: tuple[Event, ...]
    """Work, by the order of its start on each rank."""
    transfers: tuple[Transfer, ...]
    """Everything sent."""
    ranks: int
    """Ranks P."""

    @property
    def seconds(self) -> float:
        """From the first piece of work to the end of the last."""
        return max(event.end for event in self.events)

    def busy(self, rank: int) -> float:
        """Seconds that a rank worked."""
        return sum(event.end - event.start for event in self.events if event.rank == rank)

    @property
    def mean_busy(self) -> float:
        """Seconds that a rank worked, the mean over the ranks."""
        return sum(event.end - event.start for event in self.events) / self.ranks

    @property
    def bubble_fraction(self) -> float:
        """Share of the step in which ranks do not work: ``1 - busy / (P * seconds)``."""
        return 1 - self.mean_busy / self.seconds

    @property
    def bubble_overhead(self) -> float:
        """The same against the working time: ``P * seconds / busy - 1``."""
        return self.seconds / self.mean_busy - 1


@dataclass(frozen=True, kw_only=True)
class Hops:
    """Times of the transfers, by the later one of the two stages; a stage that is not there needs none."""

    forward: Mapping[int, HopTime]
    """To that stage."""
    backward: Mapping[int, HopTime]
    """From that stage to the one before."""


NO_HOPS = Hops(forward={}, backward={})
"""As if everything were there at once."""


def simulate(order: Order, stage_ranks: Sequence[int], times: Sequence[StageTime], hops: Hops) -> Timeline:
    """Go through a step.

    Args:
        order: By rank, its actions in order.
        stage_ranks: Rank of each stage.
        times: By stage.
        hops: Transfers that take time.

    Raises:
        ConfigError: The order cannot be worked through: every rank waits for another.

    Examples:
        Two stages of one second each way, one micro-batch: forward, forward, backward, backward.

        >>> from attnres.parallel.planning.orders import schedule_order
        >>> from attnres.parallel.schedules import schedule_kind
        >>> order = schedule_order(schedule_kind("gpipe"), ranks=2, virtual=1, microbatches=1)
        >>> second = StageTime(forward=1.0, backward_inputs=1.0, backward_weights=0.0)
        >>> simulate(order, (0, 1), (second, second), NO_HOPS).seconds
        4.0
    """
    run = _Run(order, stage_ranks, times, hops)
    while run.left:
        if not run.advance():
            raise ConfigError("the schedule cannot be worked through: every rank waits for another")
    return Timeline(events=tuple(run.events), transfers=tuple(run.transfers), ranks=len(order))


class _Run:
    """The state of a simulation."""

    def __init__(self, order: Order, stage_ranks: Sequence[int], times: Sequence[StageTime], hops: Hops):
        self.order = [[action for action in actions if action.work != "R"] for actions in order]
        self.ranks, self.times, self.hops = stage_ranks, times, hops
        self.at = [0] * len(order)
        self.free = [0.0] * len(order)
        self.arrived: dict[tuple[int, str, int], float] = {}  # stage, direction, micro-batch
        self.link_free: dict[tuple[int, int], float] = {}
        self.events: list[Event] = []
        self.transfers: list[Transfer] = []

    @property
    def left(self) -> bool:
        return any(at < len(actions) for at, actions in zip(self.at, self.order, strict=True))

    def advance(self) -> bool:
        """Let every rank do what it can; whether any could."""
        moved = False
        for rank, actions in enumerate(self.order):
            while self.at[rank] < len(actions):
                ready = self._ready(actions[self.at[rank]])
                if ready is None:
                    break
                self._do(rank, actions[self.at[rank]], ready)
                self.at[rank] += 1
                moved = True
        return moved

    def _ready(self, action: Action) -> float | None:
        """When the input of an action is there; None while nobody knows."""
        if action.work == "F":
            needed = None if action.stage == 0 else (action.stage, "forward", action.microbatch)
        elif action.work == "W" or action.stage == len(self.ranks) - 1:
            needed = None  # the rank has it, from an earlier action of its own
        else:
            needed = (action.stage, "backward", action.microbatch)
        return 0.0 if needed is None else self.arrived.get(needed)

    def _do(self, rank: int, action: Action, ready: float) -> None:
        start = max(self.free[rank], ready)
        end = start + self.times[action.stage].of(action.work)
        self.free[rank] = end
        self.events.append(Event(rank=rank, action=action, start=start, end=end))
        if action.work == "F" and action.stage + 1 < len(self.ranks):
            self._send(action, action.stage + 1, "forward", self.hops.forward.get(action.stage + 1), end)
        elif action.work in ("B", "I") and action.stage > 0:
            self._send(action, action.stage - 1, "backward", self.hops.backward.get(action.stage), end)

    def _send(self, action: Action, stage: int, direction: str, hop: HopTime | None, made: float) -> None:
        pair = self.ranks[action.stage], self.ranks[stage]
        arrival = made
        if hop is not None and pair[0] != pair[1]:
            start = max(made, self.link_free.get(pair, 0.0))
            self.link_free[pair] = start + hop.occupied
            arrival = start + hop.occupied + hop.latency
            self.transfers.append(
                Transfer(
                    sender=pair[0],
                    receiver=pair[1],
                    stage=stage,
                    direction=direction,
                    microbatch=action.microbatch,
                    start=start,
                    end=arrival,
                )
            )
        self.arrived[stage, direction, action.microbatch] = arrival
