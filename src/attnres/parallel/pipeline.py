"""A converted model as a pipeline over the ranks of a process group, with a cross-stage cache.

PyTorch's `torch.distributed.pipelining` has the schedules and runs them; what is here cuts the model, hands it stages
whose hops carry only what is new, and makes sure beforehand that all ranks mean the same.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from attnres.errors import ConfigError, UnsupportedModelError
from attnres.models.convert import converted_base
from attnres.parallel.agreement import Round, check_agreement, settled
from attnres.parallel.failures import told_to_all
from attnres.parallel.ledger import Ledger
from attnres.parallel.part import Elsewhere, StagePart, is_tied
from attnres.parallel.plan import Cache, PipelinePlan, plan_pipeline
from attnres.parallel.schedules import ScheduleKind, build_schedule, check_pipeline
from attnres.parallel.stage import CachedStage
from attnres.parallel.store import RankStore
from attnres.parallel.tensor import TensorParallel, handle_of
from attnres.parallel.tied import TiedWeight
from attnres.residual.state import storage_bytes

STEP, EVALUATION = 1, 2
"""What ranks are about to do together."""
_OWN_ARGUMENTS = {
    "input_ids",
    "inputs_embeds",
    "token_type_ids",
    "past_key_values",
    "use_cache",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
}
Batch = tuple[Tensor, Tensor]
LossFunction = Callable[[Tensor, Tensor], Tensor]
Autocast = Callable[[], AbstractContextManager[Any]]


class Pipeline:
    """The stages of one rank, and the steps that all ranks take together.

    Every rank is given the same whole model (from the same seed or checkpoint), keeps the parts of its own stages, and
    is given all batches. Gradients are those of the mean loss over the micro-batches.

    Args:
        model: A converted causal language model, whole or from `attnres.parallel.parallelize`. Its tensors are shared
            with the parts, and go to ``device`` with them; drop it afterwards.
        group: Ranks of the pipeline, in the order of the stages; None is all of them.
        microbatches: Micro-batches M of a training step.
        schedule: One of `attnres.parallel.schedules.SCHEDULES`.
        virtual: Stages V on each rank.
        cuts: Sublayers before each cut; None spreads them evenly.
        cache: What a rank keeps between its stages, see `attnres.parallel.plan.Cache`.
        device: Where this rank computes.
        alike: Ranks of other pipelines that divide the weights of the same stages with this one (FSDP). They gather
            together, so they have to learn shapes together.
        wrap: Makes of each `StagePart` what really runs, such as ``DistributedDataParallel`` or ``fully_shard``.

    Raises:
        ConfigError: The pipeline does not fit the model, the ranks or the micro-batches, or ranks disagree about it.
        UnsupportedModelError: The model has a part that no stage can leave out.
    """

    def __init__(
        self,
        model: Any,
        *,
        group: dist.ProcessGroup | None = None,
        microbatches: int,
        schedule: str = "1f1b",
        virtual: int = 1,
        cuts: Sequence[int] | None = None,
        cache: Cache = "all",
        device: torch.device | str = "cpu",
        alike: dist.ProcessGroup | None = None,
        wrap: Callable[[StagePart], nn.Module] | None = None,
    ):
        self._tensor = handle_of(model)
        self.group, self.microbatches, self.device = group, microbatches, torch.device(device)
        self.rank, self._alike = dist.get_rank(group), alike
        self._tied = is_tied(model)

        def plan() -> tuple[tuple[ScheduleKind, PipelinePlan], str]:
            _check_whole(model, self._tensor, group)
            residual = converted_base(model).residual
            layout: Any = {"ranks": dist.get_world_size(group), "virtual": virtual, "cuts": cuts}
            kind = check_pipeline(residual.num_sublayers, microbatches=microbatches, schedule=schedule, **layout)
            dim = model.get_input_embeddings().weight.shape[-1]
            planned = plan_pipeline(
                residual.strategy, residual.num_sublayers, dim, cache=cache, placement=kind.placement, **layout
            )
            head = "tied head" if self._tied else "head apart"
            shape = f"{residual.strategy}, {dim} wide, {head}: {_describe(planned)}"
            return (kind, planned), f"{shape}, {kind.name}, M={microbatches}"

        rounds = [Round("pipeline", group)]
        self._beside: set[int] = set()  # ranks of the pipelines of its tensor ranks
        if self._tensor is not None:
            self._beside = _all_ranks(group, self._tensor.group)
            rounds.insert(0, Round("tensor", self._tensor.group, f"pipeline rank {self.rank}, "))
        self.kind, self.plan = settled(rounds, plan)
        self.store, self.ledger = RankStore(), Ledger()
        self.parts = [self._part(model, stage) for stage in self.plan.stages_of(self.rank)]
        self.tied_weight = TiedWeight.of(self.parts, self.plan, group) if self._tied else None
        if self._tensor is not None:
            self._narrow(self._tensor, model)
        self.stages = [self._stage(part, wrap) for part in self.parts]
        if self._tensor is not None:
            self._tensor.gradients.check()
        self._check_split_backward()
        self._loss: LossFunction | None = None
        self._schedule = build_schedule(self.kind, self.stages, microbatches, self._share_of_loss)
        self._learned: dict[Any, list[Any]] = {}

    @property
    def modules(self) -> list[nn.Module]:
        """What this rank has of the model, by stage. Parameters have the names that they have in the whole model."""
        return [part.decoder for part in self.parts]

    @property
    def tied(self) -> tuple[str, ...]:
        """Names of parameters that two stages have, with equal values and gradients: a head that is the embedding."""
        return () if self.tied_weight is None else self.tied_weight.names

    def train(self, mode: bool = True) -> None:
        """Put all parts in training or evaluation mode."""
        for stage in self.stages:
            stage.submod.train(mode)

    def step(
        self, batches: Sequence[Batch], loss: LossFunction, *, autocast: Autocast = nullcontext, **arguments: Any
    ) -> Tensor:
        """Forward and backward pass of a training step; gradients are added to what is there.

        Args:
            batches: Token ids and targets ``[B, T]`` of each micro-batch, all of one shape; the same on every rank.
            loss: From logits ``[B, T, vocabulary]`` and targets to the mean loss.
            autocast: Makes the context that stages run in.
            **arguments: For the model's forward, such as ``attention_mask`` ``[M B, T]``.

        Returns:
            The mean loss over the micro-batches, a scalar on every rank.

        Raises:
            ConfigError: The number or the shapes of the micro-batches do not fit.
            RankFailure: Another rank failed or was lost.
        """
        with told_to_all(self.group, "a pipeline step", beside=self._beside):
            key = self._key(batches[0][0] if batches else None, autocast, has_backward=True)
            is_new = self._check_batches(batches, arguments, key)
            self._begin(loss)
            inputs, targets = (torch.cat(list(parts)).to(self.device) for parts in zip(*batches, strict=True))
            self._prepare(key, batches[0][0], arguments, autocast, is_new=is_new)
            losses: list[Tensor] = []
            first, last = self.stages[0].is_first, self.plan.ranks[-1] == self.rank
            self._schedule.step(
                *((inputs,) if first else ()),
                target=targets if last else None,
                losses=losses if last else None,
                return_outputs=False,
                **arguments,
            )
            if self.tied_weight is not None:
                self.tied_weight.add_gradients()
            total = torch.stack([value.detach() for value in losses]).sum() if last else None
            return self._tell_all(total)

    @torch.no_grad()
    def evaluate(
        self, inputs: Tensor, targets: Tensor, loss: LossFunction, *, autocast: Autocast = nullcontext
    ) -> Tensor:
        """The loss of one batch, forward only; a scalar on every rank.

        Args:
            inputs: Token ids ``[B, T]``; any shape, the same on every rank.
            targets: Likewise.
            loss: From logits and targets to the mean loss.
            autocast: Makes the context that stages run in.

        Raises:
            RankFailure: Another rank failed or was lost.
        """
        with told_to_all(self.group, "a pipeline evaluation", beside=self._beside):
            inputs, targets = inputs.to(self.device), targets.to(self.device)
            key = self._key(inputs, autocast, has_backward=False)
            is_new = self._agree((EVALUATION, *inputs.shape), f"an evaluation of {list(inputs.shape)}", "", key)
            self._begin(loss)
            self._prepare(key, inputs, {}, autocast, is_new=is_new)
            output = None
            sending: list[dist.Work] = []
            for stage in self.stages:
                _wait(_start(stage.get_fwd_recv_ops(0)))
                output = stage.forward_one_chunk(0, (inputs,), save_forward_output=False)
                sending += _start(stage.get_fwd_send_ops(0))
                if stage.next_hop is not None and stage.next_hop.is_local:
                    self.stages[self.stages.index(stage) + 1].set_local_fwd_input(output, 0)
            _wait(sending)
            for stage in self.stages:
                stage._post_metadata_inference_cleanup()  # a step wants weights divided that this has left whole
            return self._tell_all(loss(output, targets) if isinstance(output, Tensor) else None)

    def held_bytes(self, *, gradients: bool = True) -> int:
        """Bytes of states, and of their gradients, that this rank holds now, each piece of memory once."""
        tensors = [*self.store.tensors(), *(tensor for stage in self.stages for tensor in stage.held())]
        if gradients:
            tensors += [*self.store.gradients(), *(left for stage in self.stages for left in stage.held_gradients())]
        return storage_bytes(tensors)

    def _stage(self, part: StagePart, wrap: Callable[[StagePart], nn.Module] | None) -> CachedStage:
        return CachedStage(
            part if wrap is None else wrap(part),
            self.plan,
            part.stage,
            store=self.store,
            ledger=self.ledger,
            device=self.device,
            group=self.group,
        )

    def _part(self, model: Any, stage: int) -> StagePart:
        tokens = None if self._tensor is None else self._tensor.tokens
        part = StagePart(model, self.plan, stage, tokens=tokens, reads_ahead=not self.kind.splits_backward)
        return part.to(self.device)

    def _narrow(self, tensor: TensorParallel, model: Any) -> None:
        """Let the handle of a parallelized model look after this rank's stages."""
        if self._tied and self.plan.num_stages > 1 and tensor.tokens.logits == "own":
            raise UnsupportedModelError(
                'the head is the embedding, and logits="own" are of a part of the tokens; allowed in a pipeline: '
                'logits="all", or a head apart'
            )
        elsewhere = self.tied if not self.parts[0].is_first else ()
        stages = dist.group.WORLD if self.group is None else self.group
        assert stages is not None
        tensor.narrow(self.modules, stages, frozenset(elsewhere))
        model.register_forward_pre_hook(_refuse_alone)

    def _check_split_backward(self) -> None:
        """Refuse what cannot compute the gradients of weights apart from those of inputs."""
        if not self.kind.splits_backward:
            return
        allowed = "allowed: fully_shard of each stage as a whole, or a schedule without split backward passes"
        why = f"the schedule {self.kind.name} computes the gradients of weights apart"
        for module in (stage.submod for stage in self.stages):
            if isinstance(module, DistributedDataParallel):
                raise UnsupportedModelError(f"{why}, past the hooks of DistributedDataParallel; {allowed}")
            if any(isinstance(inner, FSDPModule) for inner in module.modules() if inner is not module):
                raise UnsupportedModelError(
                    f"{why}, when the layers that fully_shard divides are apart again; {allowed}"
                )

    def _begin(self, loss: LossFunction) -> None:
        """Forget what an earlier step left behind, whole or broken off."""
        self._loss = loss
        self._schedule._internal_losses.clear()
        self.ledger.clear()
        for stage in self.stages:
            stage.clear_runtime_states()
        if self.tied_weight is not None and torch.is_grad_enabled():
            self.tied_weight.begin()

    def _share_of_loss(self, output: Tensor, target: Tensor) -> Tensor:
        assert self._loss is not None
        value: Any = self._loss(output, target)
        if not isinstance(value, Tensor) or value.numel() != 1:
            seen = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ConfigError(f"the loss is {seen}; allowed: a tensor of one number")
        return value.squeeze() / self.microbatches

    def _check_batches(self, batches: Sequence[Batch], arguments: dict[str, Any], key: "_Key") -> bool:
        """Refuse micro-batches that differ, here or between ranks, before anything is sent.

        Returns:
            Whether some rank has not had a step of this kind.
        """
        shapes = [tuple(map(tuple, (inputs.shape, targets.shape))) for inputs, targets in batches]
        problem = ""
        if len(batches) != self.microbatches:
            problem = f"{len(batches)} micro-batches were given; allowed: {self.microbatches}"
        elif len(set(shapes)) > 1:
            other = next(index for index, shape in enumerate(shapes) if shape != shapes[0])
            problem = (
                f"micro-batch {other} has token ids {list(shapes[other][0])} and targets {list(shapes[other][1])}, "
                f"micro-batch 0 {list(shapes[0][0])} and {list(shapes[0][1])}; allowed: one shape"
            )
        size = shapes[0][0] if shapes else ()
        problem = problem or _problem_of_arguments(arguments, sum(len(inputs) for inputs, _ in batches))
        told = {name: list(value.shape) for name, value in sorted(arguments.items()) if isinstance(value, Tensor)}
        here = f"{len(batches)} micro-batches of {list(size)}" + (f" with {told}" if told else "")
        numbers = (STEP, len(batches), *size, crc32(repr(sorted(arguments)).encode()))
        return self._agree(numbers, here, problem, key)

    def _agree(self, numbers: Sequence[int], here: str, problem: str, key: "_Key") -> bool:
        """Raise on all ranks unless all are about to do the same, and none has a problem.

        Returns:
            Whether some rank has not done it before.
        """
        is_new = key not in self._learned
        if self._tensor is not None:
            group = self._tensor.group
            equal, is_new = _compare(group, (*numbers, -1 if problem else 0), is_new, self.device)
            problem = problem or ("" if equal else f"its tensor ranks differ; this one has {here}")
        if self._alike is not None:
            _, is_new = _compare(self._alike, (), is_new, self.device)
        equal, is_new = _compare(self.group, (*numbers, -1 if problem else 0), is_new, self.device)
        if problem or not equal:
            check_agreement(self.group, problem or here, wrong=bool(problem))
        return is_new

    def _key(self, inputs: Tensor | None, autocast: Autocast, *, has_backward: bool) -> "_Key":
        """What decides the shapes of a state, as far as this rank can see."""
        kind = self.device.type
        with autocast():
            precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        weights = tuple((p.requires_grad, p.dtype) for part in self.parts for p in part.parameters())
        return _Key(None if inputs is None else tuple(inputs.shape), precision, has_backward, weights)

    def _prepare(
        self, key: "_Key", inputs: Tensor, arguments: dict[str, Any], autocast: Autocast, *, is_new: bool
    ) -> None:
        """Make sure that each stage knows the shapes of what it will be sent."""
        for part in self.parts:
            part.autocast = autocast
        if self._tensor is not None:
            self._tensor.tokens.count = inputs.shape[1]
        for stage in self.stages:
            stage.has_backward = key.has_backward
        if is_new:
            self._learn(inputs, arguments, has_backward=key.has_backward)
            self._learned[key] = [(stage.shapes, stage.next_shapes, stage.taken) for stage in self.stages]
        for stage, learned in zip(self.stages, self._learned[key], strict=True):
            stage.shapes, stage.next_shapes, stage.taken = learned

    def _learn(self, inputs: Tensor, arguments: dict[str, Any], *, has_backward: bool) -> None:
        """Let the stages tell each other the shapes, first to last; random generators stay as they are."""
        rows = len(inputs)
        first = {name: value[:rows] if isinstance(value, Tensor) else value for name, value in arguments.items()}
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices=devices, device_type=self.device.type if devices else "cuda"):
            told: Any = None
            for stage in self.stages:
                given = (inputs.to(self.device),) if stage.is_first else told
                told = stage.learn(given, first, has_backward=has_backward)
        for stage in self.stages:
            stage._post_metadata_inference_cleanup()

    def _tell_all(self, value: Tensor | None) -> Tensor:
        """A scalar that the rank of the last stage has, on every rank."""
        shared = torch.zeros((), dtype=torch.float64, device=self.device) if value is None else value.double()
        source = self.plan.ranks[-1]
        dist.broadcast(shared, group=self.group, group_src=source)
        return shared


def _check_whole(model: Any, tensor: TensorParallel | None, group: dist.ProcessGroup | None) -> None:
    """Refuse a model that has been divided already, but for one that `parallelize` divided."""
    if tensor is None and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UnsupportedModelError(
            "the model is divided over ranks already (it has DTensor parameters); allowed: a whole model, or one from "
            "parallelize, and wrap= to divide its stages"
        )
    if any(isinstance(module, Elsewhere) for module in model.modules()):
        raise UnsupportedModelError("the model is a part of a pipeline already; allowed: a whole model")
    if tensor is None:
        return
    if tensor.stages is not None:
        raise UnsupportedModelError("the parallelized model is in a pipeline already; allowed: one pipeline for each")
    pipeline, others = (set(dist.get_process_group_ranks(ranks)) for ranks in (group, tensor.group))
    if len(pipeline & others) > 1:
        raise ConfigError(
            f"ranks {sorted(pipeline & others)} are tensor ranks and pipeline ranks of each other; allowed: two "
            'dimensions of a mesh, such as parallelize(model, mesh["tensor"]) and group=mesh.get_group("pipeline")'
        )


def _problem_of_arguments(arguments: dict[str, Any], rows: int) -> str:
    """What is wrong with keyword arguments for the model's forward, of which each micro-batch gets its rows."""
    for name, value in arguments.items():
        if name in _OWN_ARGUMENTS:
            return f"{name} is given; allowed: arguments that every stage can use, such as attention_mask, position_ids"
        if isinstance(value, Tensor) and (value.ndim == 0 or len(value) != rows):
            return f"{name} has shape {list(value.shape)}; allowed: {rows} rows, those of all micro-batches"
        if isinstance(value, dict | list | tuple):
            return f"{name} is a {type(value).__name__}; allowed: a tensor with a row for each sequence"
    return ""


def _all_ranks(group: dist.ProcessGroup | None, tensor: dist.ProcessGroup) -> set[int]:
    """Numbers of the ranks of all pipelines that share tensors."""
    told: list[Any] = [None] * dist.get_world_size(tensor)
    dist.all_gather_object(told, dist.get_process_group_ranks(group), group=tensor)
    return set().union(*told)


def _refuse_alone(model: nn.Module, positional: Any) -> None:
    """Before a forward pass of a parallelized model whose gradients a pipeline looks after."""
    del model, positional
    raise UnsupportedModelError("the parallelized model is in a pipeline; allowed: its step and evaluate")


class _Key(NamedTuple):
    """Steps with equal keys have states of equal shapes."""

    size: tuple[int, ...] | None
    precision: torch.dtype | None
    has_backward: bool
    weights: tuple[tuple[bool, torch.dtype], ...]
    """Of this rank: which are trained, and in which dtype."""


def _compare(
    group: dist.ProcessGroup | None, numbers: Sequence[int], flag: bool, device: torch.device
) -> tuple[bool, bool]:
    """Whether all ranks have the same numbers, and whether any has the flag."""
    room = torch.zeros(8, dtype=torch.int64, device=device)
    room[: min(len(numbers), 7)] = torch.tensor(numbers[:7], dtype=torch.int64)
    pair = torch.stack([room, -room])
    pair[:, 7] = int(flag)
    dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
    return bool((pair[0, :7] == -pair[1, :7]).all()), bool(pair[0, 7])


def _describe(plan: PipelinePlan) -> str:
    stages = f"cut at {list(plan.cuts)}, stages on ranks {list(plan.ranks)}"
    return f"{plan.num_sublayers} sublayers {stages}, cache {plan.cache}"


def _start(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
