"""Tables about the layout: what hops carry, and what ranks hold."""

from dataclasses import replace

from attnres.parallel.ledger import Direction
from attnres.parallel.plan import Cache
from attnres.parallel.planning.communication import (
    carried,
    paper_counts,
    sources_sent,
    total_bytes,
)
from attnres.parallel.planning.hardware import accelerator
from attnres.parallel.planning.memory import prefill_memory, training_memory
from attnres.parallel.planning.planned import CACHES, Planned
from attnres.parallel.planning.step import exposed
from attnres.parallel.planning.table import Column, Quantity, Table, quantities, shown

NAIVE_FIRST: tuple[Cache, ...] = ("off", "received", "all")
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def hops_table(planned: Planned) -> Table:
    """The bytes of each hop, for each way to cache."""
    sent = {cache: planned.arms[cache].sent for cache in NAIVE_FIRST}
    rows = []
    for hop in planned.arm.plan.hops:
        ways = [
            total_bytes(sent[cache], hop=hop.stage, direction=direction)
            for cache in NAIVE_FIRST
            for direction in DIRECTIONS
        ]
        ranks = f"{hop.sender}>{hop.receiver}"
        rows.append((hop.stage, ranks, *ways, "(handed over)" if hop.is_local else carried(hop)))
    formulas: dict[Direction, str] = {
        "forward": "tensors that the receiver lacks * tokens * D * bytes",
        "backward": "a gradient for each of them; in float32 for finished sources",
    }
    columns = [
        Column(
            key=f"{cache}_{direction}",
            title=f"{CACHES[cache].removeprefix('cache ')} {'->' if direction == 'forward' else '<-'}",
            unit="bytes",
            formula=formula,
        )
        for cache in NAIVE_FIRST
        for direction, formula in formulas.items()
    ]
    return Table(
        key="hops",
        title="Bytes of each hop, one micro-batch, from one tensor rank",
        columns=(
            Column(key="stage", title="to", unit="index"),
            Column(key="ranks", title="ranks"),
            *columns,
            Column(key="carries", title=f"carries ({CACHES[planned.request.cache]})"),
        ),
        rows=tuple(rows),
        notes=("E: embedding. bK: sum of the block that ends after K sublayers. partial: the sum of the open block.",),
    )


def communication_table(planned: Planned) -> Table:
    """Totals of a step beside the paper's formulas."""
    counts = paper_counts(planned.strategy, planned.arm.plan)
    rows = []
    for cache in NAIVE_FIRST:
        arm = planned.arms[cache]
        paper = None if counts is None else float(getattr(counts, cache))
        largest = max(hop.blocks for hop in arm.plan.hops)
        sent = total_bytes(arm.sent) * planned.request.microbatches
        rows.append((CACHES[cache], paper, sources_sent(arm.plan), largest, sent, exposed(arm, planned.order)))
    notes = ("The paper's formulas count block sums alone: embedding and partial sum come on top.",)
    if counts is not None:
        kind = "are counts" if counts.is_exact else "are means, as blocks and stages do not end together"
        notes += (f"Here N_p = N/C = {counts.blocks_per_stage} blocks end in a stage, and they {kind}.",)
    return Table(
        key="communication",
        title="Communication of a step",
        columns=(
            Column(key="cache", title="hops"),
            Column(
                key="paper",
                title="formula",
                unit="tensors",
                formula="naive C(C-1)/2 N_p; received P(P-1)/2 N_p + (V-1)P^2 N_p; all: P(P-1) in place of P^2",
            ),
            Column(key="blocks", title="blocks", unit="count", formula="block sums over all hops, one micro-batch"),
            Column(key="largest", title="largest", unit="count", formula="of one hop; (C-1) N_p naive, P N_p received"),
            Column(key="bytes", title="bytes", unit="bytes", formula="both directions, all hops and micro-batches"),
            Column(key="exposed", title="exposed", unit="seconds", formula="step time less that with instant hops"),
        ),
        rows=tuple(rows),
        notes=notes,
    )


def training_table(planned: Planned) -> Table:
    """Memory of every rank while it trains."""
    request, device = planned.request, accelerator(planned.request.gpu)
    ranks = training_memory(planned.size, planned.arm.plan, planned.order, planned.strategy, request)
    rows = [
        (
            memory.rank,
            ", ".join(map(str, memory.stages)),
            memory.parameters,
            memory.weights + memory.gradients,
            memory.optimizer,
            memory.activations,
            memory.sources,
            memory.logits,
            memory.total,
            memory.microbatches,
            memory.fits(device.memory),
        )
        for memory in ranks
    ]
    kept = "D a sublayer, + one sublayer whole" if request.checkpointing else "2D + outputs of matrices, a sublayer"
    share = "of its stages / tensor" + (" / data" if request.sharding == "fsdp" else "")
    return Table(
        key="training_memory",
        title=f"Memory of a rank in training, {request.optimizer}, on {device.name}",
        columns=(
            Column(key="rank", title="rank", unit="index"),
            Column(key="stages", title="stages"),
            Column(key="parameters", title="param.", unit="parameters", formula=share),
            Column(key="weights", title="w + grad", unit="bytes", formula="8 bytes a parameter, float32"),
            Column(key="optimizer", title="optim.", unit="bytes", formula="8 bytes a parameter; Muon 4 for matrices"),
            Column(key="activations", title="activ.", unit="bytes", formula=f"{kept}; micro-batches under way"),
            Column(key="sources", title="sources", unit="bytes", formula="E, blocks, partial sums of these"),
            Column(key="logits", title="logits", unit="bytes", formula="4 V tokens"),
            Column(key="total", title="total", unit="bytes", formula="what is known of these"),
            Column(key="microbatches", title="mb", unit="count", formula="micro-batches under way at most"),
            Column(key="fits", title="fits", formula=f"total up to {device.memory / 1e9:.0f} GB"),
        ),
        rows=tuple(rows),
        notes=(
            "Not counted: fragmentation, workspaces, buffers of transfers, weights that FSDP2 has gathered.",
            *_other_way(planned),
        ),
    )


def _other_way(planned: Planned) -> tuple[str, ...]:
    """Activations with checkpointing the other way than asked for."""
    other = replace(planned.request, checkpointing=not planned.request.checkpointing)
    ranks = training_memory(planned.size, planned.arm.plan, planned.order, planned.strategy, other)
    most = [memory.activations for memory in ranks if memory.activations is not None]
    word = "with" if other.checkpointing else "without"
    return (f"Activations {word} checkpointing: up to {shown(max(most), 'bytes')} on a rank.",) if most else ()


def prefill_table(planned: Planned) -> Table:
    """Memory of a rank while a prompt is taken in."""
    request = planned.request
    memory = prefill_memory(planned.size, planned.arm.plan, planned.strategy, request)
    shared, chunk = f"blocks, {request.tensor} tensor ranks", f"blocks, chunks of {request.chunk}"
    rows: list[Quantity] = [
        ("weights", memory.weights, "bytes", "largest rank, in the dtype of the stream, / tensor"),
        ("keys and values", memory.cache, "bytes", "not public" if memory.cache is None else "of the whole prompt"),
        ("blocks, one rank", memory.whole, "bytes", "N tokens D bytes (paper, section 4.2)"),
        (shared, memory.shared, "bytes", "N (tokens / ranks) D bytes"),
        (chunk, memory.chunked, "bytes", "N (chunk / ranks) D bytes"),
        ("sources as held", memory.held, "bytes", "with embedding and partial sum, as a run holds them"),
    ]
    return quantities("prefill_memory", f"Memory of a rank in the prefill of {request.prompt} tokens", rows)
