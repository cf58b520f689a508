"""Training steps of a pipeline, with its cross-stage cache and without: bytes sent, memory of sources, and time.

All arms run in the same processes, step by step in turn, so that they share the drift of the machine. Bytes are those
of the ledger, which notes each transfer as it is started; beside them stands the paper's formula for the block sums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from attnres.bench.models import ModelShape
from attnres.bench.progress import say
from attnres.bench.ranks import ARMS, FORMULAS, cross_entropy, on_ranks, random_batches
from attnres.bench.results import significant
from attnres.bench.timing import Times, interleaved, paired_ratios, spread, taken, wall_clock
from attnres.errors import ConfigError
from attnres.models import build
from attnres.parallel.pipeline import Batch, Pipeline
from attnres.parallel.plan import Cache
from attnres.residual import BlockAttnRes


@dataclass(frozen=True, kw_only=True)
class PipelineBench:
    """What to run.

    Raises:
        ConfigError: Blocks do not end where stages do, so that the formulas do not apply.
    """

    shape: ModelShape
    ranks: int
    virtual: int
    microbatches: int
    rows: int
    """Sequences of a micro-batch."""
    context: int
    """Tokens of a sequence."""
    rounds: int

    def __post_init__(self) -> None:
        stages = self.ranks * self.virtual
        if 2 * self.shape.layers % self.shape.blocks or self.shape.blocks % stages:
            raise ConfigError(
                f"{2 * self.shape.layers} sublayers in {self.shape.blocks} blocks do not end where {stages} stages do; "
                f"allowed: a number of blocks that {stages} divides, and that divides the number of sublayers"
            )

    @property
    def strategy(self) -> BlockAttnRes:
        """Block AttnRes."""
        return BlockAttnRes(num_blocks=self.shape.blocks)


@dataclass(frozen=True, kw_only=True)
class PipelineRow:
    """One arm."""

    ranks: int
    virtual: int
    schedule: str
    microbatches: int
    layers: int
    dim: int
    blocks: int
    tokens: int
    """Of a micro-batch."""
    cache: str
    median_ms: float
    low_ms: float
    high_ms: float
    rounds: int
    ratio_to_off: float
    ratio_low: float
    ratio_high: float
    block_bytes: int
    """Finished block sums sent forward in a step, by all ranks."""
    formula_bytes: int
    """What the formula says of them."""
    forward_bytes: int
    """Everything sent forward, with embedding and partial sum."""
    backward_bytes: int
    """Gradients sent back."""
    largest_hop_bytes: int
    """The most that one hop sends forward for one micro-batch."""
    held_bytes: int
    """Sources and partial sums that the fullest rank held at its fullest moment."""


def measure(bench: PipelineBench) -> Iterator[PipelineRow]:
    """Run all arms on processes of this machine, one for each rank, and give a row for each."""
    say(
        f"{bench.ranks} processes, {bench.virtual} stages each: warm-up, then {bench.rounds} rounds of {len(ARMS)} arms"
    )
    told = on_ranks(bench.ranks, _run, bench)
    for arm in ARMS:
        yield _row(bench, arm, told["times"], told[arm])


def _row(bench: PipelineBench, arm: Cache, times: Times, facts: dict[str, int]) -> PipelineRow:
    mine, ratios = spread(taken(times, arm)), spread(paired_ratios(times, arm, "off"))
    one_source = bench.rows * bench.context * bench.shape.dim * 4
    blocks = FORMULAS[arm](bench.ranks, bench.virtual, bench.shape.blocks // (bench.ranks * bench.virtual))
    return PipelineRow(
        ranks=bench.ranks,
        virtual=bench.virtual,
        schedule=_schedule(bench),
        microbatches=bench.microbatches,
        layers=bench.shape.layers,
        dim=bench.shape.dim,
        blocks=bench.shape.blocks,
        tokens=bench.rows * bench.context,
        cache=arm,
        median_ms=significant(1e3 * mine.median),
        low_ms=significant(1e3 * mine.low),
        high_ms=significant(1e3 * mine.high),
        rounds=mine.count,
        ratio_to_off=significant(ratios.median),
        ratio_low=significant(ratios.low),
        ratio_high=significant(ratios.high),
        formula_bytes=int(blocks * one_source * bench.microbatches),
        **facts,
    )


def _schedule(bench: PipelineBench) -> str:
    return "1f1b" if bench.virtual == 1 else "interleaved1f1b"


def _run(bench: PipelineBench) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build(bench.shape.config, bench.strategy, dtype=torch.float32)
    pipelines = {arm: _pipeline(model, bench, arm) for arm in ARMS}
    batches = random_batches(bench.microbatches, bench.rows, bench.context, bench.shape.vocab)
    facts: dict[str, Any] = {}
    for arm, pipeline in pipelines.items():
        pipeline.step(batches, cross_entropy)  # learns the shapes; the ledger starts at the next
        facts[arm] = _facts(pipeline, batches)
    clock = wall_clock(torch.device("cpu"))
    steps = {arm: lambda pipeline=pipeline: _step(pipeline, batches) for arm, pipeline in pipelines.items()}
    for step in steps.values():
        step()
    facts["times"] = interleaved(steps, clock, rounds=bench.rounds)
    return facts


def _pipeline(model: Any, bench: PipelineBench, arm: Cache) -> Pipeline:
    pipeline = Pipeline(
        model, microbatches=bench.microbatches, schedule=_schedule(bench), virtual=bench.virtual, cache=arm
    )
    pipeline.train()
    return pipeline


def _step(pipeline: Pipeline, batches: Sequence[Batch]) -> None:
    """A step from the moment when all ranks are ready to the moment when all are done."""
    dist.barrier()
    pipeline.step(batches, cross_entropy)
    dist.barrier()
    for module in pipeline.modules:
        module.zero_grad(set_to_none=True)
    pipeline.ledger.clear()


def _facts(pipeline: Pipeline, batches: Sequence[Batch]) -> dict[str, int]:
    """Bytes of a step, of all ranks together."""
    pipeline.ledger.clear()
    held = _watch_held(pipeline)
    pipeline.step(batches, cross_entropy)
    for stage in pipeline.stages:
        del stage.forward_one_chunk  # the watch
    rows = pipeline.ledger.rows
    hops: dict[Any, int] = {}
    for row in rows:
        if row.direction == "forward":
            hops[row.stage, row.micro_batch] = hops.get((row.stage, row.micro_batch), 0) + row.bytes
    sums = [
        pipeline.ledger.total("forward", "block"),
        pipeline.ledger.total("forward"),
        pipeline.ledger.total("backward"),
    ]
    block, forward, backward = _over_ranks(sums, dist.ReduceOp.SUM)
    largest, fullest = _over_ranks([max(hops.values(), default=0), max(held)], dist.ReduceOp.MAX)
    pipeline.ledger.clear()
    return {
        "block_bytes": block,
        "forward_bytes": forward,
        "backward_bytes": backward,
        "largest_hop_bytes": largest,
        "held_bytes": fullest,
    }


def _watch_held(pipeline: Pipeline) -> list[int]:
    """Note after each forward pass of a stage how many bytes of states the rank holds."""
    held = [0]
    for stage in pipeline.stages:
        original: Any = stage.forward_one_chunk

        def watched(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            held.append(pipeline.held_bytes(gradients=False))
            return result

        stage.forward_one_chunk = watched
    return held


def _over_ranks(numbers: list[int], operation: Any) -> list[int]:
    tensor = torch.tensor(numbers, dtype=torch.int64)
    dist.all_reduce(tensor, op=operation)
    return tensor.tolist()
