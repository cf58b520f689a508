"""Memory of each rank of a pipeline, in training and in the prefill of a prompt.

How many micro-batches a rank holds at once is read off the order in which it works. Their sources are counted by
`attnres.parallel.bank`, which also counts those of a run. What is assumed of a run: weights, gradients and optimizer
state in float32; activations in the stream's dtype, of each sublayer the read, its norm, and what each matrix puts out,
or with checkpointing what is new in the residual state, one tensor ``[tokens, D]``; nothing for fragmentation, kernels'
workspaces, buffers of transfers, and the weights of a layer that FSDP2 has gathered.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from attnres.parallel.bank import bank_bytes, held_sources
from attnres.parallel.plan import PipelinePlan
from attnres.parallel.planning.communication import new_numbers
from attnres.parallel.planning.io_table import floor
from attnres.parallel.planning.orders import Action, Order
from attnres.parallel.planning.request import PlanRequest
from attnres.parallel.planning.sizes import ModelSize
from attnres.residual import Strategy
from attnres.residual.history import HistoryStrategy

FLOAT = 4
"""Bytes of float32."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank while it trains."""

    rank: int
    """Of the pipeline."""
    stages: tuple[int, ...]
    """Its stages."""
    parameters: float
    """Number of parameters it holds."""
    weights: float
    """Bytes of these, in float32."""
    gradients: float
    """Bytes of their gradients, in float32."""
    optimizer: float
    """AdamW: two numbers for each; Muon: one for matrices, two for the others."""
    activations: float | None
    """Bytes kept for the backward passes to come; None where the model's sizes are not public."""
    sources: float
    """Bytes of finished sources, embedding and partial sum of the micro-batches under way."""
    logits: float | None
    """Bytes of the logits of one micro-batch, in float32; None where the vocabulary is not public."""
    microbatches: int
    """Micro-batches under way at most."""

    @property
    def total(self) -> float:
        """What is known of it."""
        known = self.weights + self.gradients + self.optimizer + self.sources
        return known + (self.activations or 0) + (self.logits or 0)

    def fits(self, memory: float) -> str:
        """Whether an accelerator has as much memory: ``"yes"`` and ``"no"``, or ``"?"`` where a part is not known."""
        if self.total > memory:
            return "no"
        return "?" if None in (self.activations, self.logits) else "yes"


@dataclass(frozen=True, kw_only=True)
class PrefillMemory:
    """Bytes on one rank while a prompt is taken in."""

    weights: float
    """In the stream's dtype, on the rank with the most."""
    cache: float | None
    """Keys and values of the whole prompt on the rank with the most; None where sizes are not public."""
    whole: float
    """Finished blocks of the whole prompt in one forward on one rank: ``N T d`` numbers, the paper's first figure."""
    shared: float
    """The same shared among the tensor ranks."""
    chunked: float
    """And in chunks."""
    held: float
    """The most that a run holds then: embedding and partial sum counted too."""


def training_memory(
    size: ModelSize, plan: PipelinePlan, order: Order, strategy: Strategy, request: PlanRequest
) -> tuple[RankMemory, ...]:
    """Memory of every rank of the pipeline.

    Args:
        size: The model.
        plan: Its stages.
        order: In which ranks work.
        strategy: The residual strategy; one without sources holds its state in the activations.
        request: Layout and assumptions.
    """
    own = isinstance(strategy, HistoryStrategy)  # whose sources are counted by themselves
    numbers = new_numbers(strategy, size.num_sublayers, size.dim)
    return tuple(
        replace(
            _rank_memory(rank, size, plan, order[rank], numbers, request),
            sources=_sources_bytes(peak_sources(plan, order[rank]), size, request) if own else 0,
        )
        for rank in range(plan.num_ranks)
    )


def _rank_memory(
    rank: int,
    size: ModelSize,
    plan: PipelinePlan,
    actions: Sequence[Action],
    numbers: Sequence[int],
    request: PlanRequest,
) -> RankMemory:
    stages = plan.stages_of(rank)
    parameters, matrices = (
        sum(numbers) for numbers in zip(*(_weights(size, plan, s, request) for s in stages), strict=True)
    )
    kept = {stage: _kept_bytes(size, plan, stage, numbers, request) for stage in stages}
    live = list(_live(actions))
    has_head = plan.num_stages - 1 in stages
    logits = None if size.vocabulary is None else FLOAT * size.vocabulary * request.tokens / request.tensor
    is_known = all(value is not None for value in kept.values())
    work = _workspace(size, plan, stages, request) if request.checkpointing else 0.0
    return RankMemory(
        rank=rank,
        stages=stages,
        parameters=parameters,
        weights=FLOAT * parameters,
        gradients=FLOAT * parameters,
        optimizer=FLOAT * (2 * parameters - (matrices if request.optimizer == "muon" else 0)),
        activations=_peak_activations(live, kept) + work if is_known and work is not None else None,
        sources=0,
        logits=logits if has_head else 0.0,
        microbatches=max((len({action[1] for action in now}) for now in live), default=0),
    )


def _weights(size: ModelSize, plan: PipelinePlan, stage: int, request: PlanRequest) -> tuple[float, float]:
    """Parameters of a stage that one accelerator holds, and those of them that are matrices."""
    start, stop = plan.span(stage)
    rows = size.sublayers[start:stop]
    parameters = sum(row.parameters for row in rows) + sum(size.residual_per_site[start:stop])
    if stage == 0:
        parameters += size.embedding
    if stage == plan.num_stages - 1:
        is_apart = not size.is_tied or stage > 0  # a tied head is there once more where the embedding is not
        parameters += size.final_norm + size.residual_per_site[-1] + size.head * is_apart
    share = request.tensor * (request.data if request.sharding == "fsdp" else 1)
    return parameters / share, sum(row.matrices for row in rows) / share


def _kept_bytes(
    size: ModelSize, plan: PipelinePlan, stage: int, new: Sequence[int], request: PlanRequest
) -> float | None:
    """What a stage keeps of one micro-batch for its backward pass; with checkpointing, what is new in the state."""
    span = slice(*plan.span(stage))
    numbers = new[span] if request.checkpointing else [row.kept_numbers for row in size.sublayers[span]]
    if any(number is None for number in numbers):
        return None
    return sum(number or 0.0 for number in numbers) * request.tokens * request.element_bytes / request.tensor


def _workspace(size: ModelSize, plan: PipelinePlan, stages: Iterable[int], request: PlanRequest) -> float | None:
    """Activations of the one sublayer that is being recomputed."""
    rows = [row for stage in stages for row in size.sublayers[slice(*plan.span(stage))]]
    if any(row.kept_numbers is None for row in rows):
        return None
    return max(row.kept_numbers or 0.0 for row in rows) * request.tokens * request.element_bytes / request.tensor


def _live(actions: Sequence[Action]) -> Iterable[frozenset[tuple[int, int]]]:
    """After each forward, the pairs of stage and micro-batch whose backward pass is not through."""
    splits = _split(actions)
    now: set[tuple[int, int]] = set()
    for action in actions:
        if action.work == "F":
            now.add((action.stage, action.microbatch))
            yield frozenset(now)
        elif _ends(action, splits):
            now.discard((action.stage, action.microbatch))


def _split(actions: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Stages and micro-batches whose backward pass is in two parts."""
    return frozenset((action.stage, action.microbatch) for action in actions if action.work == "W")


def _ends(action: Action, splits: frozenset[tuple[int, int]]) -> bool:
    """Whether nothing of a micro-batch is needed on a stage any more."""
    return action.work == "W" or (action.work == "B" and (action.stage, action.microbatch) not in splits)


def _peak_activations(live: Iterable[frozenset[tuple[int, int]]], kept: Mapping[int, float | None]) -> float:
    return max((sum(kept[stage] or 0.0 for stage, _ in now) for now in live), default=0.0)


def peak_sources(plan: PipelinePlan, actions: Sequence[Action]) -> int:
    """The most tensors of the residual state that a rank holds, by its order.

    What a hop brings is held from when it may arrive, what a stage makes from its forward pass on, both until the
    backward pass of that stage. With a cache that is one copy of each on a rank; without, a stage has its own.

    Args:
        plan: Stages and hops.
        actions: Of the rank, in order.
    """
    splits = _split(actions)
    most = now = 0
    for action in actions:
        if action.work == "R":
            now += _brought(plan, action.stage)
        elif action.work == "F":
            now += _made(plan, action.stage)
        elif _ends(action, splits):
            now -= _made(plan, action.stage) + _brought(plan, action.stage)
        most = max(most, now)
    return most


def _brought(plan: PipelinePlan, stage: int) -> int:
    """Tensors that come from another rank; those of a stage on the same one are handed over as they are."""
    return 0 if stage == 0 or plan.hops[stage - 1].is_local else len(plan.brought(stage))


def _made(plan: PipelinePlan, stage: int) -> int:
    """Tensors that a stage makes: sources, and the partial sum that goes out, as its outputs are added to what came."""
    known = {leaf.key for leaf in plan.incoming(stage).leaves} if stage else set()
    return sum(leaf.key not in known for leaf in plan.outgoing(stage).leaves)


def _sources_bytes(tensors: int, size: ModelSize, request: PlanRequest) -> int:
    return bank_bytes(
        blocks=tensors,
        tokens=request.context,
        dim=size.dim,
        element_bytes=request.element_bytes,
        tensor_ranks=request.tensor,
        batch=request.micro_batch_size,
    )


def prefill_memory(size: ModelSize, plan: PipelinePlan, strategy: Strategy, request: PlanRequest) -> PrefillMemory:
    """Memory of the rank with the most, while one prompt is taken in.

    Args:
        size: The model.
        plan: Its stages.
        strategy: The residual strategy; one without sources holds one state.
        request: Layout, prompt and chunk.
    """
    blocks, held = _prefill_sources(strategy, size.num_sublayers, size.dim)
    count = partial(bank_bytes, tokens=request.prompt, dim=size.dim, element_bytes=request.element_bytes)
    ranks, chunk = request.tensor, request.chunk
    whole = replace(request, sharding="ddp")  # a forward pass has its stages' weights together, however they are stored
    by_rank = [sum(_weights(size, plan, s, whole)[0] for s in plan.stages_of(r)) for r in range(plan.num_ranks)]
    return PrefillMemory(
        weights=max(by_rank) * request.element_bytes,
        cache=_cache_bytes(size, plan, request),
        whole=count(blocks=blocks),
        shared=count(blocks=blocks, tensor_ranks=ranks),
        chunked=count(blocks=blocks, tensor_ranks=ranks, chunk=chunk),
        held=count(blocks=held, tensor_ranks=ranks, chunk=chunk),
    )


def _prefill_sources(strategy: Strategy, num_sublayers: int, dim: int) -> tuple[int, int]:
    """Blocks of the model, and the most tensors that a state holds."""
    if not isinstance(strategy, HistoryStrategy):
        return 0, math.ceil(floor(strategy, num_sublayers, dim).state)
    sites = [held_sources(strategy, num_sublayers, site) for site in range(num_sublayers + 1)]
    return sites[-1].blocks, max(site.tensors for site in sites)


def _cache_bytes(size: ModelSize, plan: PipelinePlan, request: PlanRequest) -> float | None:
    most = 0.0
    for rank in range(plan.num_ranks):
        rows = [row for stage in plan.stages_of(rank) for row in size.sublayers[slice(*plan.span(stage))]]
        if any(row.cache_numbers is None for row in rows):
            return None
        most = max(most, sum((row.cache_numbers or 0.0) / min(request.tensor, row.cache_parts) for row in rows))
    return most * request.prompt * request.element_bytes
