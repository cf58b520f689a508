"""What the tests of the pipeline run on the ranks: small models, one process's numbers, and a pipeline's."""

import contextlib
import gc
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import LlamaConfig

from attnres.errors import AttnResError
from attnres.models import build
from attnres.optim.groups import freeze_base
from attnres.parallel.part import StagePart
from attnres.parallel.pipeline import Pipeline
from attnres.parallel.plan import PipelinePlan, plan_pipeline
from attnres.parallel.schedules import schedule_kind
from attnres.residual import BlockAttnRes
from models.small import ALL_CONFIGS

VOCAB, DIM, TOKENS, ROWS = 48, 16, 5, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a pipeline and a step."""

    strategy: Any = field(default_factory=lambda: BlockAttnRes(sublayers_per_block=3, phases="one"))
    layers: int = 6
    family: str | None = None
    """One of `models.small.ALL_CONFIGS`; None is a smaller Llama."""
    tied: bool = False
    microbatches: int = 4
    schedule: str = "1f1b"
    virtual: int = 1
    cuts: tuple[int, ...] | None = None
    cache: str = "all"
    checkpointing: str | None = None
    dtype: torch.dtype = torch.float64
    autocast: bool = False
    frozen: bool = False
    """Whether only the residual path is trained."""

    @property
    def name(self) -> str:
        changed = [f"{k.name}={getattr(self, k.name)}" for k in fields(self) if getattr(self, k.name) != _default(k)]
        return ",".join(changed).replace("torch.", "") or "plain"


def _default(entry: Any) -> Any:
    return entry.default if entry.default is not MISSING else entry.default_factory()


def small_model(case: Case) -> Any:
    torch.manual_seed(1)
    model = build(_config(case), case.strategy, dtype=case.dtype)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.base_model.residual.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    if case.checkpointing is not None:
        model.activation_checkpointing_enable({"use_reentrant": case.checkpointing == "reentrant"})
    if case.frozen:
        freeze_base(model)
    return model.train()


def _config(case: Case) -> Any:
    if case.family is not None:
        return ALL_CONFIGS[case.family](layers=case.layers)
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=24,
        num_hidden_layers=case.layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=case.tied,
    )


def batches(case: Case, step: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(10 + step)
    ids = torch.randint(0, VOCAB, (case.microbatches, ROWS, TOKENS + 1), generator=generator)
    return [(row[:, :-1], row[:, 1:]) for row in ids]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(
        logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten()
    )


def autocast(case: Case) -> Any:
    return partial(torch.autocast, "cpu", dtype=torch.bfloat16) if case.autocast else contextlib.nullcontext


def one_process_step(model: Any, case: Case, step: int = 0) -> torch.Tensor:
    losses = {}
    for index, (inputs, targets) in in_order(case, step):
        with autocast(case)():
            logits = model(input_ids=inputs, use_cache=False).logits
        loss = cross_entropy(logits, targets) / case.microbatches
        loss.backward()
        losses[index] = loss.detach()
    return torch.stack([losses[index] for index in range(case.microbatches)]).sum()


def in_order(case: Case, step: int) -> list[Any]:
    """The micro-batches in the order of their backward passes."""
    order = list(enumerate(batches(case, step)))
    return order[::-1] if case.schedule == "loopedbfs" else order


def make_pipeline(case: Case, **options: Any) -> Pipeline:
    return Pipeline(
        small_model(case),
        microbatches=case.microbatches,
        schedule=case.schedule,
        virtual=case.virtual,
        cuts=case.cuts,
        cache=case.cache,  # pyright: ignore[reportArgumentType]
        **options,
    )


def gradients(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone()
        for module in pipeline.modules
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def routed_step(parts: Sequence[StagePart], plan: PipelinePlan, case: Case, step: int = 0) -> torch.Tensor:
    """One process, no protocol: all stages in a row in one autograd graph, tensors passed on by the routes of the plan.

    A rank's copy of a tensor is an alias of it, made where its hop brings it, so autograd adds up the gradients in the
    order in which the ranks do. Nothing is detached, deposited or sent.
    """
    losses = {}
    for index, (inputs, targets) in in_order(case, step):
        held: dict[int, dict[str, torch.Tensor]] = {rank: {} for rank in plan.ranks}
        state: dict[str, torch.Tensor] = {}
        for stage, part in enumerate(parts):
            own = held[plan.ranks[stage]]
            given = {leaf.key: state[leaf.key].view_as(state[leaf.key]) for leaf in plan.brought(stage)}
            arguments = [given.get(leaf.key, own.get(leaf.key)) for leaf in plan.incoming(stage).leaves]
            result = part(*arguments) if stage else part(inputs)
            if stage < len(parts) - 1:
                state = dict(zip([leaf.key for leaf in plan.outgoing(stage).leaves], result, strict=True))
                own |= {key: state[key] for key in own.keys() | plan.kept[stage] if key in state}
        loss = cross_entropy(result, targets) / case.microbatches
        loss.backward()
        losses[index] = loss.detach()
    return torch.stack([losses[index] for index in range(case.microbatches)]).sum()


def routed(case: Case, ranks: int) -> tuple[list[StagePart], PipelinePlan]:
    """The stages of a pipeline, all in this process."""
    plan, model = plan_of(case, ranks), small_model(case)
    return [StagePart(model, plan, stage) for stage in range(plan.num_stages)], plan


def plan_of(case: Case, ranks: int) -> PipelinePlan:
    return plan_pipeline(
        case.strategy,
        2 * case.layers,
        DIM,
        ranks=ranks,
        virtual=case.virtual,
        cuts=case.cuts,
        cache=case.cache,  # pyright: ignore[reportArgumentType]
        placement=schedule_kind(case.schedule).placement,
    )


def pipeline_step(case: Case) -> dict[str, Any]:
    pipeline = make_pipeline(case)
    loss = pipeline.step(batches(case), cross_entropy, autocast=autocast(case))
    return {
        "loss": loss,
        "gradients": gradients(pipeline),
        "rows": list(pipeline.ledger.rows),
        "held": pipeline.held_bytes(),
        "tied": pipeline.tied,
    }


def adamw(modules: Sequence[torch.nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=3e-3)


def pipeline_training(case: Case, steps: int) -> dict[str, torch.Tensor]:
    """Weights after some optimizer steps, and that nothing is held after any of them."""
    pipeline = make_pipeline(case)
    optimizer = adamw(pipeline.modules)
    for step in range(steps):
        optimizer.zero_grad()
        pipeline.step(batches(case, step), cross_entropy, autocast=autocast(case))
        assert pipeline.held_bytes() == 0
        optimizer.step()
    return weights(pipeline.modules)


def weights(modules: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {name: value.detach() for module in modules for name, value in module.named_parameters()}


def live_tensors(case: Case, steps: int) -> list[tuple[int, int]]:
    """How many tensors, and how many bytes of them, the process has after some of the steps."""
    pipeline = make_pipeline(case)
    counts = []
    for step in range(steps):
        pipeline.step(batches(case, step), cross_entropy)
        for module in pipeline.modules:
            module.zero_grad()
        pipeline.ledger.clear()
        if step % 15 == 4:
            gc.collect()
            found = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
            counts.append((len(found), sum(t.untyped_storage().nbytes() for t in found)))
    return counts


def held_at_peak(case: Case) -> tuple[int, int]:
    """The most bytes of states that the rank held after a forward pass, and those of one copy of each tensor."""
    pipeline = make_pipeline(case)
    found = [(0, 0)]
    for stage in pipeline.stages:
        original = stage.forward_one_chunk

        def watched(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            found.append((pipeline.held_bytes(gradients=False), _one_copy_each(pipeline)))
            return result

        stage.forward_one_chunk = watched
    pipeline.step(batches(case), cross_entropy)
    return max(found)


def _one_copy_each(pipeline: Pipeline) -> int:
    """Bytes of the states of all micro-batches under way, each key once."""
    seen: dict[Any, int] = {}
    for stage in pipeline.stages:
        for micro_batch, buffers in stage._arriving.items():
            seen |= {(micro_batch, key): tensor.numel() * tensor.element_size() for key, tensor in buffers.items()}
        for micro_batch, done in stage._passes.items():
            keys = [leaf.key for leaf in pipeline.plan.incoming(stage.stage_index).leaves]
            named = dict(zip(keys, done.inputs, strict=True)) if stage.stage_index else {}
            for key, tensor in {**named, **done.outputs}.items():
                seen[micro_batch, key] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def evaluate(case: Case, rows: Sequence[int]) -> list[torch.Tensor]:
    """Losses of batches of several sizes, between two training steps."""
    pipeline = make_pipeline(case)
    pipeline.step(batches(case), cross_entropy)
    losses = []
    for count in rows:
        pipeline.train(False)
        inputs, targets = evaluation_batch(count)
        losses.append(pipeline.evaluate(inputs, targets, cross_entropy))
        assert pipeline.held_bytes() == 0
    pipeline.train()
    losses.append(pipeline.step(batches(case), cross_entropy))
    return losses


def evaluation_batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (count, TOKENS + 3), generator=torch.Generator().manual_seed(5))
    return ids[:, :-1], ids[:, 1:]


def step_with_transfers_watched(case: Case) -> dict[str, Any]:
    """The ledger's rows, and how many bytes the schedule itself was given to send."""
    from torch.distributed.pipelining import schedules

    sent = 0
    original = schedules._batch_p2p

    def watched(operations: Any, desc: str | None = None) -> Any:
        nonlocal sent
        sent += sum(o.tensor.numel() * o.tensor.element_size() for o in operations if o.op is dist.isend)
        return original(operations, desc)

    with mock.patch.object(schedules, "_batch_p2p", watched):
        pipeline = make_pipeline(case)
        pipeline.step(batches(case), cross_entropy)
    return {"rows": list(pipeline.ledger.rows), "sent": sent}


def disagree(changed: Case, at: int) -> str:
    """Build a pipeline that one rank has other settings for; what this rank is told."""
    return told(lambda: make_pipeline(changed if dist.get_rank() == at else Case()))


def odd_batches(at: int, how: str) -> str:
    """A step in which one rank is given other micro-batches; what this rank is told."""
    case = Case()
    pipeline = make_pipeline(case)
    given = batches(case)
    pipeline.step(given, cross_entropy)
    if dist.get_rank() == at:
        inputs, targets = given[1]
        if how == "one shorter":
            given[1] = (inputs[:, :-1], targets[:, :-1])
        elif how == "all shorter":
            given = [(a[:, :-1], b[:, :-1]) for a, b in given]
        else:
            given = given[:-1]
    message = told(lambda: pipeline.step(given, cross_entropy))
    assert pipeline.step(batches(case), cross_entropy).isfinite()  # and the pipeline still works
    return message


def failing_loss(at: int) -> str:
    """A step in which something of the user's own raises on one rank."""
    case = Case()
    pipeline = make_pipeline(case)
    pipeline.step(batches(case), cross_entropy)
    if dist.get_rank() == at:
        pipeline.stages[0].submod.register_forward_pre_hook(_raise)
    return told(lambda: pipeline.step(batches(case), cross_entropy))


def _raise(*_: Any) -> None:
    raise ValueError("no such token\nat all")


def lost_rank(at: int, how: str) -> str:
    """A step in which one rank ends, or says nothing any more."""
    case = Case()
    pipeline = make_pipeline(case)
    pipeline.step(batches(case), cross_entropy)
    if dist.get_rank() == at:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(20)
        os._exit(0)
    began = time.monotonic()
    message = told(lambda: pipeline.step(batches(case), cross_entropy))
    return f"{message} [{time.monotonic() - began:.0f} s]"


def told(action: Any) -> str:
    try:
        action()
    except AttnResError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001  # what a user's own code raises
        return f"{type(error).__name__}: {error}"
    return "nothing"
