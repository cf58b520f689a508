"""Tables about the step: times of stages, the simulated step, where the overhead is from, what is assumed."""

from attnres.parallel.planning.hardware import LINKS, NODE_SIZE, accelerator
from attnres.parallel.planning.planned import Planned
from attnres.parallel.planning.step import Arm, exposed
from attnres.parallel.planning.table import Column, Quantity, Table, quantities


def stages_table(planned: Planned) -> Table:
    """Times of every stage."""
    arm, rows = planned.arm, []
    for stage, (cost, plain) in enumerate(zip(arm.costs, planned.base.costs, strict=True)):
        start, stop = arm.plan.span(stage)
        hop = arm.hops.forward.get(stage)
        rows.append(
            (
                stage,
                arm.plan.ranks[stage],
                f"{start}-{stop - 1}",
                cost.compute,
                cost.collectives,
                plain.residual_forward,
                cost.residual_forward,
                plain.residual_backward,
                cost.residual_backward,
                0.0 if hop is None else hop.occupied + hop.latency,
            )
        )
    return Table(
        key="stages",
        title="Times of the stages, one micro-batch",
        columns=(
            Column(key="stage", title="stage", unit="index"),
            Column(key="rank", title="rank", unit="index"),
            Column(key="sublayers", title="sublayers"),
            Column(
                key="compute",
                title="compute",
                unit="seconds",
                formula="forward operations * tokens / tensor / (peak * share)",
            ),
            Column(
                key="collectives",
                title="tensor",
                unit="seconds",
                formula="2 a sublayer, (T-1)/T of [tokens, D]; NVLink up to 8 ranks",
            ),
            Column(key="plain_forward", title="PreNorm ->", unit="seconds", formula="residual bytes / bandwidth share"),
            Column(key="forward", title="this ->", unit="seconds", formula="residual bytes / bandwidth share"),
            Column(key="plain_backward", title="PreNorm <-", unit="seconds", formula="the same, backward"),
            Column(key="backward", title="this <-", unit="seconds", formula="the same, backward"),
            Column(key="hop", title="hop in", unit="seconds", formula="latency + forward bytes / bandwidth share"),
        ),
        rows=tuple(rows),
        notes=(
            "Backward: compute for the inputs, compute for the weights, which some schedules put off, and "
            f"{'the forward pass once more' if planned.request.checkpointing else 'no forward pass once more'}.",
        ),
    )


def step_table(planned: Planned) -> Table:
    """The simulated steps."""
    start = planned.base.timeline.seconds
    arms: list[Arm] = [planned.base, *planned.arms.values()]
    if planned.request.pipeline == 1:
        arms = [planned.base, planned.arm]  # without hops all ways to cache are one
    rows = [
        (
            arm.name + " *" * (arm is planned.arm),
            arm.timeline.seconds,
            arm.timeline.mean_busy,
            arm.timeline.bubble_fraction,
            exposed(arm, planned.order),
            arm.timeline.seconds / start - 1,
        )
        for arm in arms
    ]
    return Table(
        key="step",
        title=f"A step of {planned.request.microbatches} micro-batches, simulated",
        columns=(
            Column(key="arm", title="residual path"),
            Column(key="seconds", title="step time", unit="seconds", formula="end of the last event"),
            Column(key="busy", title="busy", unit="seconds", formula="time a rank works, the mean over ranks"),
            Column(key="bubbles", title="bubbles", unit="share", formula="1 - busy / step time"),
            Column(key="exposed", title="exposed", unit="seconds", formula="step time less that with instant hops"),
            Column(key="overhead", title="overhead", unit="share", formula="T / T_PreNorm - 1"),
        ),
        rows=tuple(rows),
        notes=("*: the one asked for.",),
    )


def overhead_table(planned: Planned) -> Table:
    """Where the overhead comes from."""
    found = planned.overhead
    rows: list[Quantity] = [
        ("residual traffic", found.traffic, "share", "more work of a rank, the mean, / T_PreNorm"),
        ("bubbles", found.bubbles, "share", "longer step with that work and PreNorm's hops, less that work"),
        ("communication", found.communication, "share", "longer step with its own hops than with PreNorm's"),
        ("overhead", found.total, "share", "sum of the three = T / T_PreNorm - 1"),
    ]
    note = "Bubbles are negative where more work falls into waits that are there anyway."
    return quantities("overhead", f"Where the overhead of {planned.arm.name}, comes from", rows, note)


def assumptions_table(planned: Planned) -> Table:
    """The machine."""
    request = planned.request
    device, share = accelerator(request.gpu), request.efficiency
    links = LINKS.values() if request.link == "node" else (LINKS[request.link],)
    rows: list[Quantity] = [
        ("operations", device.flops, "flop per second", device.source),
        ("memory", device.memory_bandwidth, "bytes per second", "the same"),
        *((link.name, link.bandwidth, "bytes per second", link.source) for link in links),
        *((f"{link.name}, latency", link.latency, "seconds", "assumed") for link in links),
        ("share of operations", share.compute, "share", "assumed: --efficiency.compute"),
        ("share of memory", share.memory, "share", "assumed: --efficiency.memory"),
        ("share of links", share.link, "share", "assumed: --efficiency.link"),
    ]
    notes = [
        "Compute, residual traffic and tensor collectives of a stage do not overlap; hops do. Left out for every "
        "residual path alike: kernel launches, loading of expert weights, optimizer, data-parallel traffic.",
    ]
    if request.link == "node":
        notes.append(
            f"Hops inside a node of {NODE_SIZE} go by NVLink, others by InfiniBand; tensor ranks are neighbours."
        )
    return quantities("assumptions", "Assumed of the machine", rows, *notes)
