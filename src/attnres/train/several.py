"""A run on several processes: the model cut into stages, its weights divided, and its rows shared, as the config says.

The numbers are those of one process: a pass has the same rows, of which a data rank takes its part; the micro-batches
of a pipeline are the passes; loss, gradient norm and evaluation are of the whole, and the same on every rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from attnres.errors import CheckpointError
from attnres.optim import is_depth_parameter, local_groups, optimizer_groups, optimizer_of_groups
from attnres.optim.build import SLOT
from attnres.parallel.checkpoint import StoredTensors
from attnres.parallel.clipping import clip_gradients
from attnres.parallel.data_parallel import DataParallel, GradientSum, reshard, shard
from attnres.parallel.mesh import Mesh
from attnres.parallel.pipeline import Pipeline
from attnres.parallel.tensor import parallelize
from attnres.parallel.weights import FirstWeights, named_tensors
from attnres.train.checkpoint import (
    Checkpoint,
    Checkpoints,
    find_checkpoint,
    open_checkpoint,
    open_model,
    verify_checkpoint,
)
from attnres.train.config import RunConfig
from attnres.train.forward import Loss, cross_entropy, loss_of
from attnres.train.random_state import random_state, restore_random_state, seed_rank
from attnres.train.runtime import autocast
from attnres.train.weights import check_fits, model_tensors

T = TypeVar("T")


@final
class SeveralProcesses:
    """What the loop needs of a model that a mesh trains; the same members as `attnres.train.single.SingleProcess`.

    Args:
        model: The whole model, best on the CPU: only what a rank keeps of it has to fit on its device, where it is
            moved. The values are those of rank 0, which sends every rank what it keeps.
        config: Resolved settings.
        mesh: The ranks.

    Raises:
        ConfigError: The pipeline does not fit the model.
    """

    def __init__(self, model: nn.Module, config: RunConfig, mesh: Mesh):
        self.config, self.mesh, self.is_first = config, mesh, mesh.is_first
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model_tensors(model).items()}
        self.sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self._kind, self._first_names = type(model).__name__, first_names(model)
        weights = FirstWeights(model, mesh.device)
        groups = optimizer_groups(model, config.optim)
        self._trained = {name for group in groups for name, _ in group["params"]}
        self._tensor = parallelize(model, mesh.tensor_mesh) if config.parallel.tensor > 1 else None
        self._run: _Whole | _Staged = (_Whole if config.parallel.stages == 1 else _Staged)(model, config, mesh)
        if config.train.compile:
            compile_layers(self._run.modules)
        weights.send(self._every_tensor())
        self.evaluated: nn.Module = nn.ModuleList(self._run.runs)
        self.parameters = [
            (self._first_names[name], parameter)
            for module in self._run.modules
            for name, parameter in module.named_parameters()
        ]
        self._elsewhere = self._names_of_earlier_ranks()
        self.optimizer = optimizer_of_groups(local_groups(groups, self.parameters), config.optim)
        self.share = DataShare(mesh)

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model, the first where it has several stages."""
        return self._run.modules[0]

    @property
    def eval_loss(self) -> Loss:
        """Mean loss of a batch, of this data rank's windows."""
        return self._run.eval_loss

    def agreed(self) -> AbstractContextManager[object]:
        """See `Mesh.agreed`."""
        return self.mesh.agreed()

    def from_first(self, make: Callable[[], T]) -> T:
        """See `Mesh.from_first`."""
        return self.mesh.from_first(make)

    def rows(self, starts: np.ndarray) -> np.ndarray:
        """The windows of a pass that this data rank reads."""
        return np.split(starts, self.mesh.config.data)[self.mesh.data_rank]

    def accumulate(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """See `attnres.train.forward.Passes`."""
        total = self._run.accumulate(batches).double()
        if self._tensor is not None:
            self._tensor.sum_gradients()
        if self.mesh.config.data > 1:
            dist.all_reduce(total, group=self.mesh.data_group)
        return total / self.mesh.config.data

    def clip(self, bound: float) -> Tensor:
        """See `attnres.train.forward.Passes`."""
        layout = self.mesh.config
        return clip_gradients(
            self.parameters,
            bound=bound,
            device=self.mesh.device,
            shards=(self.mesh.data_group if layout.is_sharded else self.mesh.tensor_group,),  # never divided over both
            stages=self.mesh.pipeline_group if layout.pipeline > 1 else None,
            counted_elsewhere=self._elsewhere,
        )

    def rest(self) -> None:
        """Let go of weights that an evaluation has gathered."""
        reshard(self._run.runs)

    def start(self) -> None:
        """Put weights and random generators where a new run starts."""
        train = self.config.train
        if train.init_from is not None:
            path = self.mesh.from_first(lambda: _find_verified(Path(str(train.init_from))))
            self._load_model(open_model(path), path, may_lack=is_depth_parameter)
        seed_rank(train.seed, self.mesh.place)

    def newest(self, checkpoints: Checkpoints, *, fallback: bool) -> Checkpoint | None:
        """Open the newest checkpoint, which rank 0 verifies."""
        path = self.mesh.from_first(lambda: checkpoints.newest_path(fallback=fallback))
        with self.mesh.agreed():
            return None if path is None else open_checkpoint(path)

    def load(self, checkpoint: Checkpoint) -> None:
        """Put weights and optimizer where they were, whatever the mesh was then."""
        assert isinstance(checkpoint.model, StoredTensors)
        assert isinstance(checkpoint.optimizer, StoredTensors)
        self._load_model(checkpoint.model, checkpoint.path)
        self.optimizer.load_state_dict(self._optimizer_state(checkpoint.optimizer))

    def restore_random_state(self, state: Mapping[str, Any]) -> None:
        """Put the random generators where they were; on another mesh, those of rank 0, and the others anew."""
        ranks, seed = state.get("random_of_ranks", {}), self.config.train.seed
        if ranks.get("mesh") == self._sizes_of_mesh():
            restore_random_state(ranks["states"][self.mesh.rank], one_gpu=True)
        elif self.mesh.place == 0:
            restore_random_state(state["random"], one_gpu=True)
        else:
            seed_rank(seed, self.mesh.place, state["step"])

    def random_state(self) -> dict[str, Any]:
        """Entries of a checkpoint's state for the random generators of all ranks."""
        states = self.mesh.gather(random_state(one_gpu=True))
        return {"random": states[0], "random_of_ranks": {"mesh": self._sizes_of_mesh(), "states": states}}

    def save(self, checkpoints: Checkpoints, state: dict[str, Any]) -> Path:
        """Write a checkpoint, all ranks together."""
        reshard(self._run.runs)
        optimizer = {
            key: value
            for key, value in self.optimizer.state_dict().items()
            if key.rpartition(SLOT)[0] not in self._elsewhere
        }
        model = {name: tensor for name, tensor in self._tensors() if name not in self._elsewhere}
        return checkpoints.save_sharded(self.mesh, model=model, optimizer=optimizer, state=state)

    def _every_tensor(self) -> Iterator[tuple[str, Tensor]]:
        """As `_tensors`, with the buffers that are not saved."""
        for module in self._run.modules:
            for name, tensor in named_tensors(module).items():
                yield self._first_names.get(name, name), tensor

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers of this rank, by their names in the whole model."""
        for module in self._run.modules:
            for name, tensor in model_tensors(module).items():
                if name in self._first_names:
                    yield self._first_names[name], tensor

    def _load_model(
        self, stored: StoredTensors, source: Path, may_lack: Callable[[str], bool] = lambda name: False
    ) -> None:
        shapes = {name: stored.shape(name) for name in stored}
        check_fits(shapes, self.shapes, source=source, model=self._kind, may_lack=may_lack)
        stored.copy_into((name, tensor) for name, tensor in self._tensors() if name in shapes)

    def _optimizer_state(self, stored: StoredTensors) -> dict[str, Tensor]:
        """This rank's part of a stored optimizer state."""
        slots: dict[str, list[str]] = {}
        for key in stored:
            slots.setdefault(key.rpartition(SLOT)[0], []).append(key)
        unknown = sorted(slots.keys() - self._trained)
        if unknown:
            raise CheckpointError(f"the optimizer state has parameters that are not trained here: {', '.join(unknown)}")
        state: dict[str, Tensor] = {}
        for name, parameter in self.parameters:
            for key in slots.get(name, ()):
                shape = stored.shape(key)
                if shape and shape != tuple(parameter.shape):
                    raise CheckpointError(
                        f"the optimizer state {key} has shape {list(shape)}; allowed: {list(parameter.shape)}"
                    )
                state[key] = torch.empty_like(parameter, requires_grad=False) if shape else torch.empty(())
        stored.copy_into(state.items())
        return state

    def _names_of_earlier_ranks(self) -> frozenset[str]:
        """Parameters that an earlier rank of this pipeline has as well."""
        found: list[Any] = [None] * self.mesh.config.pipeline
        dist.all_gather_object(found, [name for name, _ in self.parameters], group=self.mesh.pipeline_group)
        return frozenset(name for names in found[: self.mesh.pipeline_rank] for name in names)

    def _sizes_of_mesh(self) -> list[int]:
        return [getattr(self.mesh.config, name) for name in self.mesh.config.dimensions]


@final
class DataShare:
    """Which windows of an evaluation a data rank reads (see `attnres.train.evaluation.Share`)."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh

    def windows(self, starts: np.ndarray) -> tuple[np.ndarray, int]:
        """This rank's part; where there are too few, one that does not count, so that all ranks run."""
        own = np.array_split(starts, self._mesh.config.data)[self._mesh.data_rank]
        return (own, len(own)) if len(own) else (starts[:1], 0)

    def total(self, value: float) -> float:
        """Sum over the data ranks."""
        total = torch.tensor(value, dtype=torch.float64, device=self._mesh.device)
        if self._mesh.config.data > 1:
            dist.all_reduce(total, group=self._mesh.data_group)
        return float(total)


@final
class _Whole:
    """All layers on every rank."""

    def __init__(self, model: nn.Module, config: RunConfig, mesh: Mesh):
        train = config.train
        reentrant = train.activation_checkpointing == "reentrant"
        if not config.parallel.is_sharded:  # else shards are moved, layer by layer
            model.to(train.device)
        self._ranks = DataParallel(model, mesh, sharding=config.parallel.sharding, reentrant=reentrant)
        self.modules = self.runs = [model]
        self._loss = loss_of(model, train)
        precision = train.eval_precision or train.precision
        self.eval_loss: Loss = loss_of(model, replace(train, precision=precision))

    def accumulate(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        total = torch.zeros(())
        for index, (inputs, targets) in enumerate(batches):
            self._ranks.before_pass(is_last=index == len(batches) - 1)
            value = self._loss(inputs, targets) / len(batches)
            value.backward()
            total = total.to(value.device) + value.detach()
        self._ranks.finish()
        return total


@final
class _Staged:
    """The layers cut over the ranks of a pipeline."""

    def __init__(self, model: nn.Module, config: RunConfig, mesh: Mesh):
        train, layout = config.train, config.parallel
        self._pipeline = Pipeline(
            model,
            group=mesh.pipeline_group,
            microbatches=train.accumulation,
            schedule=layout.settled_schedule,
            virtual=layout.virtual,
            cuts=layout.cuts,
            cache=layout.cache,
            device=torch.device(train.device, torch.cuda.current_device()) if train.device == "cuda" else "cpu",
            alike=mesh.data_group if layout.is_sharded else None,
            wrap=(lambda part: shard(part, mesh.data_mesh)) if layout.is_sharded else None,
        )
        self.modules = self._pipeline.modules
        self.runs: list[nn.Module] = [stage.submod for stage in self._pipeline.stages]
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        self._sum = GradientSum(parameters, mesh.data_group) if layout.data > 1 and not layout.is_sharded else None
        self._autocast = partial(autocast, train)
        self._eval_autocast = partial(autocast, replace(train, precision=train.eval_precision or train.precision))

    def accumulate(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        total = self._pipeline.step(batches, cross_entropy, autocast=self._autocast)
        if self._sum is not None:
            self._sum.finish()
        return total

    def eval_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._pipeline.evaluate(inputs, targets, cross_entropy, autocast=self._eval_autocast)


def first_names(model: nn.Module) -> dict[str, str]:
    """For each name of a parameter or persistent buffer, the first of those that it has: a tied weight has several."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def compile_layers(modules: Sequence[nn.Module]) -> None:
    """Compile each decoder layer by itself, as collectives stand between them."""
    for module in modules:
        for layer in module.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.compile(dynamic=False)


def _find_verified(source: Path) -> Path:
    path = find_checkpoint(source)
    verify_checkpoint(path)
    return path
