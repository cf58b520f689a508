"""The bytes that a pipeline sends, predicted tensor by tensor from its plan: what the byte ledger of a run must say.

Forward, a hop carries each tensor of the state that the receiver lacks, in the stream's dtype. Backward, one gradient
comes back for each: those of finished sources in float32 (float64 for float64), because several stages have added to
them, every other in its tensor's dtype. Between two stages on one rank nothing is sent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from attnres.parallel.formulas import comm_cached, comm_naive, comm_own_reused, peak_cached, peak_naive
from attnres.parallel.layout import SOURCE_KINDS, Kind, Leaf, layouts
from attnres.parallel.ledger import Direction, Transfer
from attnres.parallel.plan import Hop, PipelinePlan
from attnres.residual import Strategy
from attnres.residual.history import HistoryStrategy

MOST_IN_WORDS = 5
"""Blocks of one hop that are named one by one."""


def gradient_bytes(kind: Kind, element_bytes: int) -> int:
    """Bytes of a number of a gradient on its way back.

    Examples:
        >>> gradient_bytes("block", 2), gradient_bytes("partial", 2), gradient_bytes("embedding", 8)
        (4, 2, 8)
    """
    return max(4, element_bytes) if kind in SOURCE_KINDS else element_bytes


def predicted_bytes(
    plan: PipelinePlan,
    *,
    tokens: int,
    element_bytes: int | Mapping[Kind, int],
    microbatches: int = 1,
    backward: bool = True,
) -> tuple[Transfer, ...]:
    """What a step sends, in the ledger's own rows: one for each hop, micro-batch, direction and tensor.

    Args:
        plan: The stages and hops.
        tokens: Tokens of a micro-batch that one rank of the pipeline has; with a sequence shared among tensor ranks,
            its own part.
        element_bytes: Bytes of a number of a state's tensors, or of those of each kind.
        microbatches: Micro-batches of a step.
        backward: Whether there is a backward pass.

    Examples:
        >>> from attnres.parallel.plan import plan_pipeline
        >>> from attnres.residual import BlockAttnRes
        >>> plan = plan_pipeline(BlockAttnRes(sublayers_per_block=2), 4, 8, ranks=2)
        >>> for row in predicted_bytes(plan, tokens=3, element_bytes=2):
        ...     print(row.stage, row.direction, row.key, row.bytes)
        1 forward E 48
        1 forward b2 48
        1 backward E 96
        1 backward b2 96
    """
    directions: tuple[Direction, ...] = ("forward", "backward") if backward else ("forward",)
    rows: list[Transfer] = []
    for hop in plan.hops:
        for microbatch in range(0 if hop.is_local else microbatches):
            for direction in directions:
                for leaf in hop.leaves:
                    size = element_bytes if isinstance(element_bytes, int) else element_bytes[leaf.kind]
                    rows.append(_row(hop, direction, microbatch, leaf, tokens * leaf.width, size))
    return tuple(rows)


def _row(hop: Hop, direction: Direction, microbatch: int, leaf: Leaf, numbers: int, element_bytes: int) -> Transfer:
    is_forward = direction == "forward"
    return Transfer(
        direction=direction,
        stage=hop.stage,
        sender=hop.sender if is_forward else hop.receiver,
        receiver=hop.receiver if is_forward else hop.sender,
        micro_batch=microbatch,
        key=leaf.key,
        kind=leaf.kind,
        bytes=numbers * (element_bytes if is_forward else gradient_bytes(leaf.kind, element_bytes)),
    )


def total_bytes(rows: Iterable[Transfer], *, hop: int | None = None, direction: Direction | None = None) -> int:
    """Sum of the rows of a hop, or of a direction, or of both."""
    return sum(row.bytes for row in rows if hop in (None, row.stage) and direction in (None, row.direction))


def new_numbers(strategy: Strategy, num_sublayers: int, dim: int) -> tuple[int, ...]:
    """By sublayer, numbers per token of the state's tensors there that were not in it one sublayer earlier.

    Examples:
        >>> from attnres.residual import BlockAttnRes, PreNorm
        >>> new_numbers(PreNorm(), 3, 8), new_numbers(BlockAttnRes(sublayers_per_block=2), 3, 8)
        ((8, 8, 8), (8, 8, 8))
    """
    known, found = set[str](), []
    for layout in layouts(strategy, num_sublayers, dim)[:-1]:
        found.append(sum(leaf.width for leaf in layout.leaves if leaf.key not in known))
        known = {leaf.key for leaf in layout.leaves}
    return tuple(found)


def sources_sent(plan: PipelinePlan, *, embedding: bool = False) -> int:
    """Finished sources that all hops send together, in tensors: block sums, and where asked the embedding.

    Hops between two stages of one rank count as nothing.
    """
    return sum((hop.sources if embedding else hop.blocks) for hop in plan.hops if not hop.is_local)


@dataclass(frozen=True, kw_only=True)
class PaperCounts:
    """The paper's formulas for a pipeline, in tensors ``[tokens, D]``, without embedding and partial sum."""

    blocks_per_stage: Fraction
    """N_p = N / C."""
    off: Fraction
    """Comm_naive."""
    received: Fraction
    """Comm_cached."""
    all: Fraction
    """With own blocks reused; not in the paper."""
    peak_off: Fraction
    """Largest hop, naive."""
    peak_received: Fraction
    """Largest hop, cached."""
    is_exact: bool
    """Whether every stage ends a block and ends the same number of them, so that the formulas are counts; else they
    are means."""


def paper_counts(strategy: Strategy, plan: PipelinePlan) -> PaperCounts | None:
    """The paper's formulas where they apply: a strategy with blocks, on stages in a loop (not a V)."""
    ends = strategy.block_ends(plan.num_sublayers) if isinstance(strategy, HistoryStrategy) else ()
    stages, ranks = plan.num_stages, plan.num_ranks
    if not ends or plan.ranks != tuple(stage % ranks for stage in range(stages)):
        return None
    virtual, per_stage = stages // ranks, Fraction(len(ends), stages)
    ended = {sum(start < end <= stop for end in ends) for start, stop in map(plan.span, range(stages))}
    return PaperCounts(
        blocks_per_stage=per_stage,
        off=comm_naive(ranks, virtual, per_stage),
        received=comm_cached(ranks, virtual, per_stage),
        all=comm_own_reused(ranks, virtual, per_stage),
        peak_off=peak_naive(ranks, virtual, per_stage),
        peak_received=peak_cached(ranks, virtual, per_stage),
        is_exact=set(plan.cuts) <= set(ends) and len(ended) == 1,
    )


def carried(hop: Hop) -> str:
    """What a hop sends, in words; of many tensors the first and the last of a kind.

    Examples:
        >>> from attnres.parallel.layout import Leaf
        >>> keys = ["E", *(f"b{end}" for end in range(2, 20, 2))]
        >>> leaves = [Leaf(key=key, kind="embedding" if key == "E" else "block", width=8) for key in keys]
        >>> carried(Hop(stage=1, sender=0, receiver=1, leaves=tuple(leaves[:3])))
        'E, b2, b4'
        >>> carried(Hop(stage=1, sender=0, receiver=1, leaves=tuple(leaves)))
        'E, b2 to b18 (9)'
    """
    blocks = [leaf.key for leaf in hop.leaves if leaf.kind == "block"]
    if len(blocks) > MOST_IN_WORDS:
        blocks = [f"{blocks[0]} to {blocks[-1]} ({len(blocks)})"]
    embedding = [leaf.key for leaf in hop.leaves if leaf.kind == "embedding"]
    others = ["partial" if leaf.kind == "partial" else leaf.key for leaf in hop.leaves if not leaf.is_source]
    return ", ".join([*embedding, *blocks, *others]) or "nothing"
