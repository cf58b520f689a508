"""Data ranks: the same layers on each, other rows on each, and one gradient.

``"fsdp"`` is PyTorch's FSDP2: each decoder layer is a unit that is gathered while it runs, and everything else, the
parameters of the residual path among them, is the root, gathered for the whole pass since every layer reads it. Weights
stay float32 and are gathered and reduced as they are; bfloat16 comes from autocast, as in a single process, so that
pseudo-queries, norms and the softmax over depth keep their precision and a mesh changes no number but by rounding.
(FSDP's own mixed precision would round those parameters too.)

``"ddp"`` keeps all weights on every rank and adds up gradients, while the backward pass still runs, as PyTorch's
DistributedDataParallel does; `GradientSum` takes its place, because DDP sorts its buckets anew after the first step, so
that a run that was resumed would add up in another order than one that was not, and because it cannot follow the
schedules of a pipeline, reentrant checkpointing together with unused parameters, or a strategy that leaves some out.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from attnres.parallel.clipping import local_part
from attnres.parallel.config import Sharding
from attnres.parallel.mesh import Mesh

BUCKET_BYTES = 32 * 2**20
"""Gradients that one all-reduce of `GradientSum` carries."""


@final
class DataParallel:
    """A whole model on the data ranks of a mesh.

    Args:
        model: The same on every rank, with gradients required where they will be, and on its device; with ``"fsdp"`` it
            may be elsewhere, as its parameters are moved and sharded in place. Names do not change.
        mesh: The ranks.
        sharding: How.
        reentrant: Whether the model runs under reentrant activation checkpointing.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, *, sharding: Sharding, reentrant: bool = False):
        self.model, self._overlaps, self._sum = model, not reentrant, None
        if mesh.config.data > 1 and sharding == "fsdp":
            shard(model, mesh.data_mesh)
        elif mesh.config.data > 1:
            self._sum = GradientSum(model.parameters(), mesh.data_group)

    def before_pass(self, *, is_last: bool) -> None:
        """Before forward and backward of a pass: gradients of a step go out with its last one.

        FSDP reduces those of every pass, so that they are sharded from then on: that is what it is for.
        """
        if self._sum is not None and is_last and self._overlaps:
            self._sum.start()

    def finish(self) -> None:
        """After the last pass of a step: every gradient is the mean over the data ranks."""
        if self._sum is not None:
            self._sum.finish()


def shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply FSDP2 to a model, or to a stage of one, in place: each decoder layer, and the rest as the root.

    Args:
        module: What to shard; it is moved to the device of the mesh.
        mesh: One-dimensional; the ranks to shard over.

    Returns:
        The module.
    """
    for layer in reversed(list(module.modules())):
        if isinstance(layer, GradientCheckpointingLayer) and any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    # A source goes through a layer as it is, and so leaves it as a view; nothing writes into sources.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    return module


def reshard(modules: Iterable[nn.Module]) -> None:
    """Let go of weights that were gathered for a pass without a backward, as in an evaluation."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


@final
class GradientSum:
    """Makes each gradient the mean over the ranks of a group, in buckets of a fixed order.

    After `start`, a bucket goes out as soon as it and those before it are complete, so that most of them travel while
    the backward pass still runs. A parameter has a gradient on all ranks or on none: they run the same layers.

    Args:
        parameters: Of this rank; every rank of the group has the same.
        group: The ranks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup):
        self._group, self._size = group, dist.get_world_size(group)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._buckets = list(_buckets(trained[::-1]))  # the last layers have their gradients first
        self._missing: list[int] | None = None
        self._sent: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
        for index, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._arrived(index))

    def start(self) -> None:
        """Before the last pass of a step, in which each parameter gets its gradient at most once."""
        self._missing = [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """After the last pass: send what has not gone yet, and wait for all."""
        self._missing = None
        while len(self._sent) < len(self._buckets):
            self._send()
        for work, flat, gradients in self._sent:
            work.wait()
            flat /= self._size
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        self._sent = []

    def _arrived(self, index: int) -> None:
        if self._missing is None:
            return
        self._missing[index] -= 1
        while len(self._sent) < len(self._buckets) and self._missing[len(self._sent)] == 0:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        bucket = self._buckets[len(self._sent)]
        gradients = [local_part(parameter.grad) for parameter in bucket if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients]) if gradients else torch.zeros(1)
        flat = flat.to(bucket[0].device)
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        self._sent.append((work, flat, gradients))


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters of one dtype, each up to `BUCKET_BYTES`."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and (size + parameter.nbytes > BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket
