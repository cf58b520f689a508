"""What the tests of tensor and pipeline ranks together run: a divided and cut model against the same one whole."""

import copy
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from attnres.models import build
from attnres.parallel.bank import own_tokens
from attnres.parallel.config import ParallelConfig
from attnres.parallel.ledger import Transfer
from attnres.parallel.mesh import Mesh
from attnres.parallel.pipeline import Pipeline
from attnres.parallel.planning.communication import predicted_bytes
from attnres.parallel.tensor import TensorParallel, parallelize
from attnres.residual import BlockAttnRes
from models.small import ALL_CONFIGS
from parallel.work_data import forget_groups
from parallel.work_pipeline import told
from parallel.work_sequence import draw, full, norm_exactly

BLOCK = BlockAttnRes(sublayers_per_block=3)
ROWS, TOKENS, LAYERS = 2, 7, 4


def mesh_of(pipeline: int = 2) -> DeviceMesh:
    """Pipeline x tensor."""
    shape = (pipeline, dist.get_world_size() // pipeline)
    return init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", "tensor"))


def short_mesh() -> DeviceMesh:
    """The same in whose groups a rank waits for 8 seconds."""
    return Mesh(ParallelConfig(pipeline=2, tensor=2, timeout=8), device="cpu").devices


def whole_model(strategy: Any = BLOCK, family: str = "llama", checkpointing: str | None = None, **changes: Any) -> Any:
    torch.manual_seed(1)
    model: Any = build(ALL_CONFIGS[family](layers=LAYERS, **changes), strategy, dtype=torch.float64)
    for parameter in model.base_model.residual.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.5)
    if checkpointing is not None:
        model.activation_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    return model.train()


def cut(
    whole: Any,
    microbatches: int = 4,
    pipeline: int = 2,
    logits: Any = "all",
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> tuple[Pipeline, TensorParallel]:
    """A copy of a model on all ranks."""
    mesh = mesh_of(pipeline) if mesh is None else mesh
    divided = copy.deepcopy(whole)
    norm_exactly(divided)
    handle = parallelize(divided, mesh["tensor"], logits=logits)
    return Pipeline(divided, group=mesh.get_group("pipeline"), microbatches=microbatches, **options), handle


def batches(count: int = 4, step: int = 0, tokens: int = TOKENS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rows = [draw(ROWS, tokens + 1, seed=100 * step + index) for index in range(count)]
    return [(row[:, :-1], row[:, 1:]) for row in rows]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def whole_step(model: Any, given: Any) -> float:
    losses = [
        cross_entropy(model(input_ids=ids, use_cache=False).logits, targets) / len(given) for ids, targets in given
    ]
    torch.stack(losses).sum().backward()
    return sum(loss.item() for loss in losses)


def worst(whole: Any, pipeline: Pipeline, kind: str = "grad") -> tuple[float, str, int]:
    """Largest difference of this rank's gradients (or values) relative to each tensor's, its name, and their number."""
    expected = dict(whole.named_parameters())
    floor = 1e-6 * max(getattr(p, kind).abs().max().item() for p in expected.values() if getattr(p, kind) is not None)
    found, count = (0.0, ""), 0
    for module in pipeline.modules:
        for name, parameter in module.named_parameters():
            mine, its = getattr(expected[name], kind), getattr(parameter, kind)
            if mine is None or its is None:
                if mine is not None or its is not None:
                    return float("inf"), name, count
                continue
            error = (full(its) - mine).abs().max().item() / max(mine.abs().max().item(), floor)
            found, count = found if error <= found[0] else (error, name), count + 1
    return *found, count


def step(case: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """One step, and an evaluation of another shape after it."""
    whole = whole_model(**case)
    norm_exactly(whole)
    pipeline, handle = cut(whole, **options)
    given = batches(options.get("microbatches", 4))
    expected, found = whole_step(whole, given), pipeline.step(given, cross_entropy)
    rows = list(pipeline.ledger.rows)
    handle.sum_gradients()
    gradient = worst(whole, pipeline)
    inputs, targets = batches(1, step=1, tokens=TOKENS + 2)[0]
    with torch.no_grad():
        looked = cross_entropy(whole(input_ids=inputs, use_cache=False).logits, targets).item()
    return {
        "loss": abs(found.item() / expected - 1),
        "gradient": gradient,
        "evaluation": abs(pipeline.evaluate(inputs, targets, cross_entropy).item() / looked - 1),
        "rows": rows,
        "held": pipeline.held_bytes(),
        "predicted": _predicted(pipeline, handle),
    }


def _predicted(pipeline: Pipeline, handle: TensorParallel) -> list[Transfer]:
    """What the planner says that this rank sends."""
    own = len(own_tokens(TOKENS, tensor_ranks=handle.mesh.size(), rank=handle.mesh.get_local_rank()))
    rows = predicted_bytes(pipeline.plan, tokens=ROWS * own, element_bytes=8, microbatches=pipeline.microbatches)
    return [row for row in rows if row.sender == pipeline.rank]


def train(steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Norms before clipping in each step of both models, and the worst difference of the weights after them."""
    whole = whole_model(tie_word_embeddings=True)
    norm_exactly(whole)
    pipeline, handle = cut(whole, **options)
    optimizers = [torch.optim.AdamW(p, lr=1e-3, eps=1e-4) for p in (whole.parameters(), handle.optimizer_groups())]
    norms = []
    for index in range(steps):
        given = batches(step=index, tokens=5 + index % 3)
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole_step(whole, given)
        pipeline.step(given, cross_entropy)
        norms.append((nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item(), handle.clip_gradients(0.5).item()))
        for optimizer in optimizers:
            optimizer.step()
    queries = {
        name: parameter.detach().clone()
        for module in pipeline.modules
        for name, parameter in module.named_parameters()
        if "pseudo_query" in name
    }
    return {"norms": norms, "weights": worst(whole, pipeline, "data"), "queries": queries}


def own_logits() -> tuple[float, tuple[float, str, int]]:
    """With logits of own tokens: the error of the sum of the tensor ranks' losses, and of the gradients."""
    whole = whole_model(tie_word_embeddings=False)
    norm_exactly(whole)
    pipeline, handle = cut(whole, logits="own")
    given = batches()

    def own_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), handle.own(targets).flatten(), reduction="sum") / targets.numel()

    expected, share = whole_step(whole, given), pipeline.step(given, own_loss)
    handle.sum_gradients()
    dist.all_reduce(share, group=handle.group)
    return abs(share.item() / expected - 1), worst(whole, pipeline)


def misuse() -> dict[str, str]:
    """Errors on this rank."""
    rank, mesh = dist.get_rank(), mesh_of()
    tensor_rank = mesh["tensor"].get_local_rank()
    calls = {
        "own logits, tied": lambda: cut(whole_model(tie_word_embeddings=True), logits="own"),
        "other micro-batches": lambda: cut(whole_model(), microbatches=4 if tensor_rank else 2),
        "other shape": lambda: cut(whole_model())[0].step(batches(tokens=6 + (rank == 3)), cross_entropy),
        "fsdp around stages": lambda: cut(whole_model(), wrap=lambda part: fully_shard(part, mesh=_alone())),
        "other schedule": lambda: cut(whole_model(), schedule="nonsense" if rank == 3 else "1f1b"),
        "other width": lambda: parallelize(whole_model(intermediate_size=48 if rank == 1 else 64), mesh["tensor"]),
        "divides on one only": lambda: parallelize(
            whole_model(intermediate_size=45 if rank == 2 else 64), mesh["tensor"]
        ),
        "one rank has too few": lambda: cut(whole_model())[0].step(batches(3 + (rank != 2)), cross_entropy),
    }
    said = {}
    for name, call in calls.items():
        said[name] = told(call)
        dist.barrier()
    return said


def twice() -> list[str]:
    """Errors of a second pipeline of one model, and of the model by itself beside a pipeline."""
    mesh = mesh_of()
    model = whole_model()
    parallelize(model, mesh["tensor"])
    Pipeline(model, group=mesh.get_group("pipeline"), microbatches=4)
    calls = [
        lambda: Pipeline(model, group=mesh.get_group("pipeline"), microbatches=4, cuts=(2,)),
        lambda: model(input_ids=batches()[0][0]),
    ]
    return [told(call) for call in calls]


def lost(how: str, at: int) -> str:
    """What a step says when one rank is killed before it, or fails in its loss and ends."""
    forget_groups()
    pipeline, _ = cut(whole_model(), mesh=short_mesh())  # ranks that have said so live on, where a program would end
    pipeline.step(batches(), cross_entropy)
    here = dist.get_rank() == at
    dist.barrier()
    if here and how == "killed":
        time.sleep(1)  # the others are in the next step by then
        os.kill(os.getpid(), signal.SIGKILL)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if here:
            raise ValueError("no such token at all")
        return cross_entropy(logits, targets)

    said = told(lambda: pipeline.step(batches(), loss))
    if here:
        os._exit(1)
    return said


def drop(tokens: int) -> tuple[str, list[torch.Tensor]]:
    """What training steps with dropout say, and this rank's embedding after them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    model: Any = build(ALL_CONFIGS["gpt_neox"](hidden_dropout=0.1), BLOCK, dtype=torch.float64)
    handle = parallelize(model.train(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle.before_each_step(optimizer)

    def steps() -> None:
        for index in range(3):
            optimizer.zero_grad()
            ids, targets = batches(1, step=index, tokens=tokens)[0]
            cross_entropy(model(input_ids=ids, use_cache=False).logits, targets).backward()
            optimizer.step()

    said = told(steps)
    with torch.no_grad():
        model.eval()(input_ids=batches(1, tokens=tokens)[0][0], use_cache=False)  # without dropout any number will do
    return said, [model.get_input_embeddings().weight.detach()]


def groups() -> dict[str, list[int]]:
    """Sizes of the groups that an optimizer is given, by the form that the parameters were in."""
    model = whole_model()
    handle = parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    forms: dict[str, Any] = {
        "nothing": lambda: None,
        "list": lambda: list(model.parameters()),
        "generator": lambda: model.parameters(),
        "pairs": lambda: model.named_parameters(),
        "group": lambda: [{"params": model.parameters(), "weight_decay": 0.1}],
        "group of pairs": lambda: [{"params": model.named_parameters()}],
        "one": lambda: [{"params": model.lm_head.weight}],
    }
    return {name: [len(group["params"]) for group in handle.optimizer_groups(form())] for name, form in forms.items()}


def limits(seconds: float) -> dict[str, float]:
    """Time-outs of the groups of a run's mesh."""
    mesh = Mesh(ParallelConfig(pipeline=2, tensor=2, timeout=seconds), device="cpu")
    groups = {"pipeline": mesh.pipeline_group, "data": mesh.data_group, "tensor": mesh.tensor_group}
    backends = {name: group._get_backend(torch.device("cpu")) for name, group in groups.items()}
    return {name: backend.options._timeout.total_seconds() for name, backend in backends.items()}


def _alone() -> DeviceMesh:
    """A dimension of data ranks with this rank alone."""
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("others", "data"))["data"]


def memory() -> tuple[int, int]:
    """Numbers that this rank's parameters have, and those of the model."""
    whole = whole_model()
    pipeline, _ = cut(whole)
    own = {id(p): p for module in pipeline.modules for p in module.parameters()}
    sizes = [p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in own.values()]
    return sum(sizes), sum(p.numel() for p in whole.parameters())
