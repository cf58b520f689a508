"""Tables about the model by itself: parameters, operations, and what the residual path moves."""

from fractions import Fraction

from attnres.parallel.planning.hardware import accelerator
from attnres.parallel.planning.io_table import depth_attention_flops, exact_mean, floor, paper_table, traffic
from attnres.parallel.planning.memory import training_memory
from attnres.parallel.planning.models import known_model
from attnres.parallel.planning.planned import Planned
from attnres.parallel.planning.sizes import CHUNK
from attnres.parallel.planning.table import Column, Quantity, Table, quantities
from attnres.residual import PreNorm, Strategy
from attnres.residual.history import HistoryStrategy

TARGET = 0.04
"""The paper's bound on the overhead of a pipelined training step (section 4.1)."""
NO_FSDP_BESIDE_TENSOR = (
    "Tensor ranks and FSDP together are planned here; this project runs tensor ranks with whole weights (ddp)."
)


def summary_table(planned: Planned) -> Table:
    """What is planned, and what comes of it."""
    request, found = planned.request, planned.overhead
    layout = f"{request.pipeline} x {request.virtual}, tensor {request.tensor}, data {request.data}"
    source = "its config.json" if request.model is None else known_model(request.model).source
    rows: list[Quantity] = [
        ("model", planned.size.name, "text", source),
        ("residual", planned.strategy.label, "text", planned.strategy.formula),
        ("pipeline x virtual", layout, "text", f"{request.accelerators} of {request.gpu}, schedule {planned.schedule}"),
        ("tokens of a step", request.step_tokens, "count", "context * sequences * micro-batches * data"),
        ("step time", planned.arm.timeline.seconds, "seconds", "simulated; no optimizer, no data-parallel reduction"),
        ("overhead over PreNorm", found.total, "share", "T / T_PreNorm - 1"),
        (
            f"below {100 * TARGET:.0f} %",
            "yes" if found.total < TARGET else "no",
            "text",
            "what the paper states for a pipeline, section 4.1",
        ),
    ]
    return quantities(
        "summary", "Plan", [*rows, _fits(planned)], *planned.size.notes, *_not_built(planned), *_repeated(planned)
    )


def _fits(planned: Planned) -> Quantity:
    """Whether training fits the memory of every rank."""
    request, device = planned.request, accelerator(planned.request.gpu)
    ranks = training_memory(planned.size, planned.arm.plan, planned.order, planned.strategy, request)
    fullest = max(ranks, key=lambda rank: rank.total)
    found = {rank.fits(device.memory) for rank in ranks}
    answer = next(word for word in ("no", "?", "yes") if word in found)
    told = f"rank {fullest.rank} needs {fullest.total / 1e9:.0f} of {device.memory / 1e9:.0f} GB; see the table below"
    return ("training fits", answer, "text", told)


def _not_built(planned: Planned) -> tuple[str, ...]:
    """What this project does not run of what is planned, or runs otherwise."""
    request = planned.request
    if request.tensor == 1:
        return ()
    notes = [
        "Tensor ranks are planned as if they divided the embedding and the logits, too; this project's keep the "
        "embedding and a tied head whole, and each computes the loss of all tokens."
    ]
    if request.data > 1 and request.sharding == "fsdp":
        notes.append(
            "Tensor ranks and FSDP together are planned here; this project runs tensor ranks with whole weights (ddp)."
        )
    if any(width.experts for width in planned.size.widths):
        notes.append("Tensor ranks of a model with experts are planned here; this project does not run them.")
    return tuple(notes)


def _repeated(planned: Planned) -> tuple[str, ...]:
    """Which heads several tensor ranks have at once."""
    ranks = planned.request.tensor
    return tuple(
        f"{width} and tensor is {ranks}: {ranks // width.size} ranks each have the same head, whose weights are "
        "counted once here; this project does not run that."
        for width in planned.size.widths
        if width.repeats(ranks)
    )


def parameters_table(planned: Planned) -> Table:
    """Parameters: all, active, the residual path's, and of stages."""
    size, plan = planned.size, planned.arm.plan
    by_stage = [
        sum(row.parameters for row in size.sublayers[slice(*plan.span(stage))]) for stage in range(plan.num_stages)
    ]
    is_stated = bool(size.notes)
    ends = None if is_stated else size.embedding + size.head * (not size.is_tied) + size.final_norm
    rows: list[Quantity] = [
        (
            "total",
            size.parameters,
            "parameters",
            "as stated by its report" if is_stated else "counted, the model built on the meta device",
        ),
        (
            "active per token",
            size.active,
            "parameters",
            "as stated by its report" if is_stated else "total less embedding and experts a token is not sent to",
        ),
        ("residual path", size.residual, "parameters", "counted; 2 D (L+1) for Full and Block AttnRes"),
        ("its share", size.residual / size.parameters, "share", "residual path / total"),
        (
            "embedding, norm, head",
            ends,
            "parameters",
            "not public, so with the sublayers" if is_stated else "2 V D + D, or V D + D if tied",
        ),
        ("smallest stage", min(by_stage), "parameters", "its sublayers, without embedding and head"),
        ("largest stage", max(by_stage), "parameters", "its sublayers, without embedding and head"),
    ]
    return quantities("parameters", "Parameters", rows)


def flops_table(planned: Planned) -> Table:
    """Operations of one token."""
    size, request = planned.size, planned.request
    weights = 2 * (sum(row.multiplied for row in size.sublayers) + size.head + size.residual_matrices)
    mixing = None if size.notes else sum(row.mixing_flops for row in size.sublayers)
    forward = weights + (mixing or 0)
    depth = depth_attention_flops(planned.strategy, size.num_sublayers, size.dim)
    own = None if depth is None else sum(depth)
    executed = "4 * forward: forward is done twice" if request.checkpointing else "3 * forward"
    attention = f"softmax: H (d_k+d_v) (T+1); KDA: H (6 d^2 + 3 C d + C^2), C={CHUNK}"
    rows: list[Quantity] = [
        ("weights, forward", weights, "flop", "2 * weights that multiply the token"),
        ("attention, forward", mixing, "flop", "not public" if mixing is None else attention),
        ("forward", forward, "flop", "weights + attention"),
        ("training", 3 * forward, "flop", "3 * forward: backward is twice forward"),
        ("training as executed", (3 + request.checkpointing) * forward, "flop", executed),
        ("depth attention, forward", own, "flop", "6 n D for each read of n > 1 sources, D for each sum"),
        ("its share", None if own is None else own / forward, "share", "depth attention / forward"),
    ]
    return quantities("flops", f"Operations per token, context T={request.context}", rows)


def io_table(planned: Planned) -> Table:
    """The paper's Table 1."""
    depth, dim = planned.size.num_sublayers, planned.size.dim
    length = _block_length(planned.strategy, depth)
    example = {row.scheme: float(row.total) for row in paper_table(128, 16)}
    rows = [
        (row.scheme, row.formula, example[row.scheme], float(row.read), float(row.write), float(row.total), row.origin)
        for row in paper_table(depth, length)
    ]
    here = f"L={depth}, S={float(length):.4g}, N=L/S={float(depth / length):.4g}, m=4, d=D={dim}"
    return Table(
        key="io",
        title="Residual traffic per token and sublayer, as the paper counts it",
        columns=(
            Column(key="scheme", title="scheme"),
            Column(key="formula", title="formula"),
            Column(key="paper", title="example", unit="vectors", formula="the paper's, L=128, S=16, N=8, m=4"),
            Column(key="read", title="read", unit="vectors", formula="its part of the formula"),
            Column(key="write", title="write", unit="vectors", formula="its part of the formula"),
            Column(key="total", title="total", unit="vectors", formula=f"read + write, with {here}"),
            Column(key="origin", title="from"),
        ),
        rows=tuple(rows),
    )


def _block_length(strategy: Strategy, num_sublayers: int) -> Fraction:
    """S: the length of the first block, as the last may be a remainder; for Full, as if there were eight blocks."""
    ends = strategy.block_ends(num_sublayers) if isinstance(strategy, HistoryStrategy) else ()
    return Fraction(ends[0]) if ends and ends[0] > 1 else Fraction(num_sublayers, min(8, num_sublayers))


def traffic_table(planned: Planned) -> Table:
    """What this strategy moves, counted over its schedule."""
    element, depth, dim = planned.request.element_bytes, planned.size.num_sublayers, planned.size.dim
    rows = []
    for strategy in (PreNorm(), planned.strategy):
        counted = floor(strategy, depth, dim)
        forward, backward = exact_mean(traffic(strategy, depth, dim, element_bytes=element))
        moved = (forward + backward) * dim * element * depth
        rows.append((strategy.label, counted.moved, forward, backward, counted.state, moved))
    return Table(
        key="residual_traffic",
        title="Residual traffic of this strategy per token and sublayer, counted over its schedule",
        columns=(
            Column(key="path", title="residual path"),
            Column(key="floor", title="floor", unit="vectors", formula="forward, by running the strategy on a token"),
            Column(
                key="forward",
                title="forward",
                unit="vectors",
                formula="n+1 for a read of n > 1, 3 to add to a sum; phases=two: far/S + 2 for the far ones of n",
            ),
            Column(
                key="backward",
                title="backward",
                unit="vectors",
                formula="5 near + 1, and for far ones (1 + 2 * 4/bytes) far/S + 2; n = 1 and PreNorm: 3",
            ),
            Column(key="state", title="state", unit="vectors", formula="the most held between two sublayers"),
            Column(key="bytes", title="per token", unit="bytes", formula="(forward + backward) * D * bytes * L"),
        ),
        rows=tuple(rows),
        notes=(
            "Of n sources, far ones were finished before the block and are read by its S reads together; near ones are "
            "the others. With phases=one all are near. Gradients of far ones add up in float32.",
        ),
    )
