"""Step time with and without Attention Residuals: times of stages and hops, and where the difference comes from.

The time of a stage is its arithmetic at a share of the peak, plus what its residual path moves at a share of the memory
bandwidth, plus the collectives of its tensor ranks; nothing of these three is taken to overlap. Hops overlap with work
(see `attnres.parallel.planning.simulate`). What both arms do alike and outside the pipeline is left out: the optimizer,
and the reduction of gradients over data ranks. That makes a relative overhead larger, not smaller.
"""

from dataclasses import dataclass, replace

from attnres.parallel.ledger import Transfer
from attnres.parallel.plan import Cache, PipelinePlan, Placement, plan_pipeline
from attnres.parallel.planning.communication import predicted_bytes, total_bytes
from attnres.parallel.planning.hardware import LINKS, NODE_SIZE, accelerator, link_between
from attnres.parallel.planning.io_table import traffic
from attnres.parallel.planning.orders import Order
from attnres.parallel.planning.request import PlanRequest
from attnres.parallel.planning.simulate import NO_HOPS, Hops, HopTime, StageTime, Timeline, simulate
from attnres.parallel.planning.sizes import ModelSize
from attnres.residual import Strategy


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """What one micro-batch of a stage takes, in seconds on one accelerator."""

    compute: float
    """Arithmetic forward."""
    residual_forward: float
    """Moving the residual path's tensors, forward."""
    residual_backward: float
    """The same backward, without recomputing."""
    collectives: float
    """Of the tensor ranks, forward; as much backward."""
    mixing: float
    """The part of `compute` that has no weights, whose whole backward pass is for the inputs."""

    def time(self, *, checkpointing: bool) -> StageTime:
        """Backward is twice the arithmetic, half of it for the weights, and forward once more if recomputed."""
        forward = self.compute + self.residual_forward + self.collectives
        weights = self.compute - self.mixing
        inputs = self.compute + self.mixing + self.residual_backward + self.collectives
        return StageTime(forward=forward, backward_inputs=inputs + forward * checkpointing, backward_weights=weights)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One residual path through the same model and layout."""

    name: str
    """For tables."""
    plan: PipelinePlan
    """Stages and hops."""
    costs: tuple[StageCost, ...]
    """By stage."""
    times: tuple[StageTime, ...]
    """By stage."""
    hops: Hops
    """Times of the transfers."""
    sent: tuple[Transfer, ...]
    """What one micro-batch sends, forward and backward, from one tensor rank."""
    timeline: Timeline
    """The simulated step."""


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What an arm costs over PreNorm, as shares of PreNorm's step; the three parts add up to the total."""

    total: float
    """``T / T_prenorm - 1``."""
    traffic: float
    """Work of the residual path, the mean over the ranks."""
    bubbles: float
    """Longer waits because that work is not the same on every stage; negative where it falls into waits."""
    communication: float
    """Longer waits because of what hops send beyond PreNorm's."""


def make_arm(
    name: str,
    strategy: Strategy,
    cache: Cache,
    size: ModelSize,
    order: Order,
    placement: Placement,
    request: PlanRequest,
) -> Arm:
    """Plan and simulate one residual path.

    Raises:
        ConfigError: The layout does not fit the depth, or the strategy does not.
    """
    plan = plan_pipeline(
        strategy,
        size.num_sublayers,
        size.dim,
        ranks=request.pipeline,
        virtual=request.virtual,
        cuts=request.cuts,
        cache=cache,
        placement=placement,
    )
    costs = _stage_costs(strategy, plan, size, request)
    times = tuple(cost.time(checkpointing=request.checkpointing) for cost in costs)
    hops, sent = _hop_times(plan, request)
    timeline = simulate(order, plan.ranks, times, hops)
    return Arm(name=name, plan=plan, costs=costs, times=times, hops=hops, sent=sent, timeline=timeline)


def overhead(arm: Arm, base: Arm, order: Order) -> Overhead:
    """Take the difference to PreNorm apart: first the work, then the hops."""
    start = base.timeline.seconds
    worked = simulate(order, arm.plan.ranks, arm.times, base.hops)
    more_work = worked.mean_busy - base.timeline.mean_busy
    return Overhead(
        total=arm.timeline.seconds / start - 1,
        traffic=more_work / start,
        bubbles=(worked.seconds - start - more_work) / start,
        communication=(arm.timeline.seconds - worked.seconds) / start,
    )


def exposed(arm: Arm, order: Order) -> float:
    """Seconds of a step that hops cost: against the same step with everything there at once."""
    return arm.timeline.seconds - simulate(order, arm.plan.ranks, arm.times, NO_HOPS).seconds


def as_prenorm(size: ModelSize) -> ModelSize:
    """The same model with the plain residual."""
    return replace(size, residual=0.0, residual_matrices=0.0, residual_per_site=(0.0,) * (size.num_sublayers + 1))


def balanced_cuts(size: ModelSize, request: PlanRequest) -> tuple[int, ...]:
    """Cuts that make the slowest stage as fast as can be, by the plain model's work, the head's on the last stage.

    Of all ways to cut, the one whose largest stage is smallest: with ``t(s, k)`` the best for the first k sublayers in
    s stages, ``t(s, k) = min over j of max(t(s-1, j), work of j..k)``.
    """
    stages, depth = request.pipeline * request.virtual, size.num_sublayers
    work = [0.0]
    for row in size.sublayers:
        work.append(work[-1] + 2 * row.multiplied + row.mixing_flops)
    work[-1] += 2 * size.head
    best = [[work[stop]] for stop in range(depth + 1)]  # by sublayers, then stages - 1: the slowest stage
    came: list[list[int]] = [[0] for _ in range(depth + 1)]
    for stage in range(1, stages):
        for stop in range(depth, -1, -1):
            options = [(max(best[start][stage - 1], work[stop] - work[start]), start) for start in range(stage, stop)]
            slowest, start = min(options, default=(float("inf"), 0))
            best[stop].append(slowest)
            came[stop].append(start)
    cuts, stop = [], depth
    for stage in range(stages - 1, 0, -1):
        stop = came[stop][stage]
        cuts.append(stop)
    return tuple(reversed(cuts))


def _stage_costs(
    strategy: Strategy, plan: PipelinePlan, size: ModelSize, request: PlanRequest
) -> tuple[StageCost, ...]:
    sites = traffic(strategy, size.num_sublayers, size.dim, element_bytes=request.element_bytes)
    device, efficiency = accelerator(request.gpu), request.efficiency
    compute = request.tokens / request.tensor / (device.flops * efficiency.compute)
    unit = request.tokens * size.dim * request.element_bytes / request.tensor
    move = unit / (device.memory_bandwidth * efficiency.memory)
    link = LINKS["nvlink" if request.tensor <= NODE_SIZE else "infiniband"]
    collective = unit * (request.tensor - 1) / (link.bandwidth * efficiency.link)
    found = []
    for stage in range(plan.num_stages):
        start, stop = plan.span(stage)
        is_last = stage == plan.num_stages - 1
        rows, path = size.sublayers[start:stop], sites[start : stop + is_last]
        mixing = sum(row.mixing_flops for row in rows)
        weights = sum(row.multiplied for row in rows) + size.head * is_last
        weights += size.residual_matrices * len(path) / len(sites)
        found.append(
            StageCost(
                compute=(2 * weights + mixing) * compute,
                residual_forward=sum(site.forward for site in path) * move,
                residual_backward=sum(site.backward for site in path) * move,
                collectives=2 * len(rows) * collective,
                mixing=mixing * compute,
            )
        )
    return tuple(found)


def _hop_times(plan: PipelinePlan, request: PlanRequest) -> tuple[Hops, tuple[Transfer, ...]]:
    """One micro-batch's transfers and their times."""
    rows = predicted_bytes(
        plan,
        tokens=-(-request.tokens // request.tensor),
        element_bytes=request.element_bytes,
    )
    forward: dict[int, HopTime] = {}
    backward: dict[int, HopTime] = {}
    for hop in plan.hops:
        if hop.is_local:
            continue
        link = link_between(request.link, hop.sender, hop.receiver, request.tensor)
        speed = link.bandwidth * request.efficiency.link
        sent = total_bytes(rows, hop=hop.stage, direction="forward")
        forward[hop.stage] = HopTime(occupied=sent / speed, latency=link.latency)
        back = total_bytes(rows, hop=hop.stage, direction="backward")
        backward[hop.stage] = HopTime(occupied=back / speed, latency=link.latency)
    return Hops(forward=forward, backward=backward), rows
