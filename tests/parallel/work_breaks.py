"""What tests of unusual use run on the ranks: several steps, parts that are not trained, arguments, mistakes."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForSequenceClassification, LlamaConfig

from attnres.models import convert
from attnres.parallel.pipeline import Pipeline
from attnres.parallel.tensor import parallelize
from attnres.residual import BlockAttnRes
from parallel.work_pipeline import (
    ROWS,
    TOKENS,
    VOCAB,
    Case,
    batches,
    cross_entropy,
    evaluation_batch,
    gradients,
    make_pipeline,
    small_model,
    told,
)


def freeze(model: nn.Module, which: str) -> None:
    """Freeze the lower half of the layers with the embedding, or everything but the head."""
    for name, parameter in model.named_parameters():
        layer = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else -1
        lower = layer in (0, 1, 2) or "embed" in name or any(f"sites.{site}." in name for site in range(7))
        if (which == "lower" and lower) or (which == "all but the head" and "lm_head" not in name):
            parameter.requires_grad_(False)


def partly_frozen(case: Case, which: str) -> dict[str, torch.Tensor]:
    model = small_model(case)
    freeze(model, which)
    pipeline = Pipeline(model, microbatches=case.microbatches, schedule=case.schedule, virtual=case.virtual)
    pipeline.step(batches(case), cross_entropy)
    return gradients(pipeline)


def two_steps(case: Case) -> dict[str, torch.Tensor]:
    """Gradients of two steps together."""
    pipeline = make_pipeline(case)
    for step in range(2):
        pipeline.step(batches(case, step), cross_entropy)
    return gradients(pipeline)


def thawed(case: Case) -> dict[str, torch.Tensor]:
    """Gradients of a step after the embedding was not trained in an earlier one."""
    model = small_model(case)
    model.get_input_embeddings().weight.requires_grad_(False)
    pipeline = Pipeline(model, microbatches=case.microbatches)
    pipeline.step(batches(case), cross_entropy)
    for module in pipeline.modules:
        module.zero_grad()
        embedding = module.get_input_embeddings()
        if embedding is not None:
            embedding.weight.requires_grad_(True)
    pipeline.step(batches(case), cross_entropy)
    return gradients(pipeline)


def cast_between_steps(case: Case) -> torch.Tensor:
    pipeline = make_pipeline(case)
    pipeline.step(batches(case), cross_entropy)
    for module in pipeline.modules:
        module.zero_grad()
        module.double()
    return pipeline.step(batches(case), cross_entropy)


def masked(case: Case) -> dict[str, Any]:
    pipeline = make_pipeline(case)
    loss = pipeline.step(batches(case), cross_entropy, attention_mask=mask(case), position_ids=positions(case))
    return {"loss": loss, "gradients": gradients(pipeline)}


def mask(case: Case) -> torch.Tensor:
    given = torch.ones(case.microbatches * ROWS, TOKENS, dtype=torch.int64)
    given[::2, 0] = 0
    return given


def positions(case: Case) -> torch.Tensor:
    return (
        torch.arange(TOKENS).expand(case.microbatches * ROWS, TOKENS) + torch.arange(case.microbatches * ROWS)[:, None]
    )


def wrong_argument(name: str, value: Any) -> str:
    case = Case()
    return told(lambda: make_pipeline(case).step(batches(case), cross_entropy, **{name: value}))


def after_a_loss_that_raises(case: Case) -> list[Any]:
    pipeline = make_pipeline(case)

    def raising(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise ValueError("no loss today")

    first = told(lambda: pipeline.step(batches(case), raising))
    return [first, pipeline.step(batches(case), cross_entropy)]


def bad_loss(kind: str) -> str:
    case = Case()
    pipeline = make_pipeline(case)
    loss = {
        "socket": _socket_loss,
        "vector": lambda logits, targets: logits.mean(-1),
        "number": lambda logits, targets: 1.0,
        "backward": lambda logits, targets: _Fails.apply(logits).mean(),
    }[kind]
    return told(lambda: pipeline.step(batches(case), loss))


def _socket_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("my own socket timed out")


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise KeyError("nothing to go back to")


def one_steps_the_other_evaluates() -> str:
    case = Case()
    pipeline = make_pipeline(case)
    if dist.get_rank():
        return told(lambda: pipeline.evaluate(*evaluation_batch(2), cross_entropy))
    return told(lambda: pipeline.step(batches(case), cross_entropy))


def different_evaluations() -> str:
    pipeline = make_pipeline(Case())
    pipeline.evaluate(*evaluation_batch(2), cross_entropy)
    pipeline.evaluate(*evaluation_batch(3), cross_entropy)
    return told(lambda: pipeline.evaluate(*evaluation_batch(2 + dist.get_rank()), cross_entropy))


def old_note() -> str:
    """All recover from a mistake of rank 0; later rank 2 is lost."""
    case = Case()
    pipeline = make_pipeline(case)
    given = batches(case)
    assert "micro-batches" in told(lambda: pipeline.step(given[:-1] if dist.get_rank() == 0 else given, cross_entropy))
    pipeline.step(given, cross_entropy)
    if dist.get_rank() == 2:
        import os

        os._exit(1)
    return told(lambda: pipeline.step(given, cross_entropy))


def refused(what: str) -> str:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        pad_token_id=0,
    )
    if what == "classifier":
        classifier = AutoModelForSequenceClassification.from_config(config)
        return told(lambda: Pipeline(convert(classifier, BlockAttnRes(num_blocks=2)), microbatches=4))
    model = small_model(Case(family="llama", layers=4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if what == "tensor and pipeline":
        parallelize(model, mesh)
        return told(lambda: Pipeline(model, microbatches=4))
    if what == "pipeline, then tensor":
        pipeline = Pipeline(model, microbatches=4)
        return told(lambda: parallelize(pipeline.modules[0], mesh))
    wrap = {"ddp": _replicate, "layers": _shard_layers}[what]
    return told(lambda: Pipeline(model, microbatches=4, schedule="zbv", virtual=2, wrap=wrap))


def _alone() -> Any:
    """A dimension of data ranks with this rank alone."""
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("pipeline", "data"))["data"]


def _replicate(part: nn.Module) -> nn.Module:
    return DistributedDataParallel(part, process_group=_alone().get_group())


def _shard_layers(part: nn.Module) -> nn.Module:
    mesh, decoder = _alone(), part.get_submodule("decoder")
    for layer in decoder.base_model.layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(part, mesh=mesh)


def replicated(case: Case) -> dict[str, torch.Tensor]:
    """Two by two processes with PyTorch's DDP around each stage: two steps. A stage alone is the whole model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("pipeline", "data"))

    def wrap(part: nn.Module) -> nn.Module:
        return DistributedDataParallel(part, process_group=mesh.get_group("data"))

    pipeline = make_pipeline(case, group=mesh.get_group("pipeline"), wrap=wrap)
    rank = mesh.get_local_rank("data")
    own = [(inputs[rank : rank + 1], targets[rank : rank + 1]) for inputs, targets in batches(case)]
    pipeline.step(own, cross_entropy)
    return gradients(pipeline)


def plain_ddp(case: Case) -> dict[str, torch.Tensor]:
    """A converted model in DDP, without a pipeline."""
    model = small_model(case)
    ddp, rank = DistributedDataParallel(model), dist.get_rank()
    (inputs, targets), *_ = batches(case)
    logits = ddp(input_ids=inputs[rank : rank + 1], use_cache=False).logits
    cross_entropy(logits, targets[rank : rank + 1]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def sharded(case: Case, per_layer: bool) -> dict[str, torch.Tensor]:
    """Two by two processes: two steps, with a first evaluation between them."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))

    def wrap(part: nn.Module) -> nn.Module:
        decoder: Any = part.decoder
        for layer in decoder.base_model.layers if per_layer else ():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh["data"])
        return fully_shard(part, mesh=mesh["data"])

    pipeline = make_pipeline(case, group=mesh.get_group("pipeline"), wrap=wrap)
    rank = mesh.get_local_rank("data")
    own = [(inputs[rank : rank + 1], targets[rank : rank + 1]) for inputs, targets in batches(case)]
    pipeline.step(own, cross_entropy)
    pipeline.evaluate(*evaluation_batch(2), cross_entropy)
    pipeline.step(own, cross_entropy)
    found = {}
    for name, gradient in gradients(pipeline).items():
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found
