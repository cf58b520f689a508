"""A stage for `torch.distributed.pipelining` whose hops carry only what the receiving rank lacks.

PyTorch's schedules decide when a stage runs, sends and receives; they ask a stage for its transfers, and this one gives
them those of the plan. The rest of the state comes from the rank's own store.

Gradients go the same way back (docs/decisions/0016-gradients-of-cached-sources.md): a stage adds up, for each tensor at
its start, what its own reads owe and what later stages owe. If a hop brought the tensor, the sum goes back over that
hop, once; if it came from the store, the sum is left there for the stage that the tensor was first brought to or made
in. Sums of finished sources are in float32 (float64 for float64), whatever dtype the sources have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from attnres.errors import ShapeError
from attnres.parallel.data_parallel import reshard
from attnres.parallel.layout import Leaf
from attnres.parallel.ledger import Ledger
from attnres.parallel.part import StagePart
from attnres.parallel.plan import Hop, PipelinePlan
from attnres.parallel.store import RankStore


class Shape(NamedTuple):
    """What has to be known of a tensor before it arrives."""

    size: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Shape":
        """The shape of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def gradient_dtype(self, leaf: Leaf) -> torch.dtype:
        """The dtype in which the gradient of a tensor travels: wide where several stages add to it."""
        return torch.promote_types(self.dtype, torch.float32) if leaf.is_source else self.dtype


@dataclass(kw_only=True, eq=False)
class _Pass:
    """What a stage remembers of a micro-batch between its passes."""

    inputs: tuple[Tensor, ...]
    """Token ids, or the tensors of the state at the start: leaves of this stage's own graph."""
    outputs: Mapping[str, Tensor]
    """The tensors of the state at the end, by key, with graph; none on the last stage, which ends in a loss."""


class CachedStage(PipelineStage):
    """One stage of a pipeline with cross-stage cache.

    Args:
        module: The `StagePart`, or what it is wrapped in.
        plan: What each hop carries; the same on every rank.
        index: Which stage this is.
        store: The cache of this rank, shared by its stages.
        ledger: Where transfers are noted, shared likewise.
        device: Where the stage runs.
        group: Process group of the pipeline.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: PipelinePlan,
        index: int,
        *,
        store: RankStore,
        ledger: Ledger,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ):
        super().__init__(module, index, plan.num_stages, device, group=group)
        self.plan, self.store, self.ledger = plan, store, ledger
        self.stage_index_to_group_rank = dict(enumerate(plan.ranks))
        self.shapes: dict[str, Shape] = {}
        """Of the tensors of the state at the start, by key."""
        self._local_stages = plan.stages_of(plan.ranks[index])
        self._whole: set[int] = set()  # micro-batches whose weights have their gradients before their turn
        self._passes: dict[int, _Pass] = {}
        self._arriving: dict[int, dict[str, Tensor]] = {}
        self._owed: dict[int, dict[str, Tensor]] = {}  # gradients that came back over the next hop
        self._owing: dict[int, dict[str, Tensor]] = {}  # gradients to send back over the hop to this stage
        self.next_shapes: dict[str, Shape] = {}
        """Of the tensors at the end."""
        self.has_learned = False
        self.taken: tuple[Shape, ...] = ()
        """Of the first stage's inputs."""

    @property
    def part(self) -> StagePart:
        """The part of the model, without what it is wrapped in."""
        part = _unwrapped(self.submod)
        assert isinstance(part, StagePart)
        return part

    def _post_metadata_inference_cleanup(self) -> None:
        """Divide again what a look at the shapes has put together; gradients stay."""
        reshard([self.submod])

    @property
    def hop(self) -> Hop | None:
        """The hop to this stage."""
        return self.plan.hops[self.stage_index - 1] if self.stage_index else None

    @property
    def next_hop(self) -> Hop | None:
        """The hop to the next stage."""
        return None if self.is_last else self.plan.hops[self.stage_index]

    # -- shapes ------------------------------------------------------------------------------------------------------

    def learn(self, given: Any, arguments: Mapping[str, Any], *, has_backward: bool) -> dict[str, Shape]:
        """Learn the shapes of what will arrive: each stage runs once on zeros and tells the next what came out.

        Args:
            given: The first stage's inputs; the shapes themselves where the stage before is on this rank.
            arguments: Keyword arguments of the module.
            has_backward: Whether gradients will come back.

        Returns:
            The shapes of the tensors at the end, where the next stage is on this rank; else nothing.
        """
        if self.hop is not None:
            self.shapes = given if self.hop.is_local else self._recv_meta(self.stage_index - 1)
        with torch.set_grad_enabled(has_backward):
            inputs = given if self.is_first else tuple(self._blank(shape) for shape in self.shapes.values())
            outputs = _unwrapped(self.submod)(*inputs, **arguments)
        self.next_shapes = {}
        if not self.is_last:
            self.next_shapes = {key: Shape.of(tensor) for key, tensor in self._named(outputs).items()}
            if self.next_hop is not None and not self.next_hop.is_local:
                self._send_meta(self.next_shapes, self.stage_index + 1)
        self.has_learned = True
        self.taken = tuple(map(Shape.of, given)) if self.is_first else ()
        return self.next_shapes

    def _blank(self, shape: Shape) -> Tensor:
        blank = torch.zeros(shape.size, dtype=shape.dtype, device=self.device)
        return blank.requires_grad_(shape.requires_grad and torch.is_grad_enabled())

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: dict[str, Any] | None = None, has_backward: bool = False
    ) -> Any:
        """As a schedule asks for it before its first step."""
        self.chunks = num_microbatches
        self.args_recv_info, self.act_send_info = {0: ()}, {}  # nothing for the base class to allocate
        return self.next_shapes if self.has_learned else self.learn(args, kwargs or {}, has_backward=has_backward)

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        """Nothing: the shapes of gradients are those of what was sent."""
        self.chunks = num_microbatches

    # -- forward -----------------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive what the hop carries, into memory of its own: the cache keeps it."""
        if self.hop is None or self.hop.is_local:
            return []
        buffers = {leaf.key: self._empty(self.shapes[leaf.key]) for leaf in self.hop.leaves}
        self._arriving[fwd_chunk_id] = buffers
        peer = self._resolve_peer_global_rank(self.stage_index - 1)
        return [dist.P2POp(dist.irecv, buffer, peer, self.group) for buffer in buffers.values()]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take over what the stage before, on this rank, has for the hop."""
        assert self.hop is not None
        self._arriving[mb_index] = {leaf.key: prev_stage_outputs[leaf.key].detach() for leaf in self.hop.leaves}

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: dict[str, Any] | None = None, save_forward_output: bool = True
    ) -> Any:
        """Put the state together, run the stage, keep what later stages of this rank will read."""
        inputs = tuple(args) if self.is_first else self._gather(fwd_chunk_id)
        if self.is_first and tuple(map(Shape.of, inputs)) != self.taken:
            seen = [list(each.shape) for each in inputs]
            raise ShapeError(f"micro-batch {fwd_chunk_id} is {seen}; allowed: {[list(s.size) for s in self.taken]}")
        output = self.forward_maybe_with_nosync(*inputs, **(kwargs or {}))
        outputs = {} if self.is_last else self._named(output)
        for key in self.plan.kept[self.stage_index] - self.shapes.keys():
            self.store.keep(fwd_chunk_id, key, outputs[key])
        self._passes[fwd_chunk_id] = _Pass(inputs=inputs, outputs=outputs)
        if not self.has_backward:
            self._end_without_backward(fwd_chunk_id)
        if self.is_last and save_forward_output:
            self.output_chunks.append(output)
        return output if self.is_last else outputs

    def _named(self, output: Sequence[Tensor]) -> dict[str, Tensor]:
        """The state at the end by key."""
        leaves = self.plan.outgoing(self.stage_index).leaves
        return {leaf.key: tensor for leaf, tensor in zip(leaves, output, strict=True)}

    def _end_without_backward(self, micro_batch: int) -> None:
        """Without a backward pass nothing is remembered but what is still to be sent, or read by a later stage."""
        if self.next_hop is None or self.next_hop.is_local:
            self._passes.pop(micro_batch)
        if self.stage_index == self._local_stages[-1]:
            self.store.drop(micro_batch)

    def _gather(self, micro_batch: int) -> tuple[Tensor, ...]:
        """The state at the start, each tensor a leaf of this stage's own graph."""
        arrived = self._arriving.pop(micro_batch)
        for key in self.plan.kept[self.stage_index] & arrived.keys():
            self.store.keep(micro_batch, key, arrived[key])
        tracked = self.has_backward and torch.is_grad_enabled()
        leaves = []
        for leaf in self.plan.incoming(self.stage_index).leaves:
            value = arrived[leaf.key] if leaf.key in arrived else self.store.value(micro_batch, leaf.key)
            leaves.append(value.detach().requires_grad_(tracked and self.shapes[leaf.key].requires_grad))
        return tuple(leaves)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send what the next rank lacks."""
        if self.next_hop is None or self.next_hop.is_local:
            return []
        outputs = self._passes[fwd_chunk_id].outputs
        sent = [(leaf, outputs[leaf.key].detach().contiguous()) for leaf in self.next_hop.leaves]
        if not self.has_backward:
            self._passes.pop(fwd_chunk_id)
        return self._send("forward", self.next_hop, self.stage_index + 1, fwd_chunk_id, sent)

    # -- backward ----------------------------------------------------------------------------------------------------

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradients of what the next hop carried."""
        if not self.has_backward or self.next_hop is None or self.next_hop.is_local:
            return []
        buffers = {}
        for leaf in self._with_gradient(self.next_hop, self.next_shapes):
            shape = self.next_shapes[leaf.key]
            buffers[leaf.key] = self._empty(shape._replace(dtype=shape.gradient_dtype(leaf)))
        self._owed[bwd_chunk_id] = buffers
        peer = self._resolve_peer_global_rank(self.stage_index + 1)
        return [dist.P2POp(dist.irecv, buffer, peer, self.group) for buffer in buffers.values()]

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Gradients for the stage before, which is on this rank."""
        return self._owing.pop(mb_index, {})

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take over the gradients from the next stage, which is on this rank."""
        self._owed[mb_index] = dict(next_stage_bwd_outputs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The stage's own backward pass, and the sums for whoever is owed them."""
        if not self.has_backward:
            return
        self._check_chunk_id(bwd_chunk_id)
        done = self._passes.pop(bwd_chunk_id)
        owed = self._collect(bwd_chunk_id, done)
        roots, root_grads = (loss, None) if self.is_last else self._roots(done.outputs, owed)
        arguments = {"stage_output": roots, "output_grads": root_grads, "input_values": list(done.inputs)}
        if full_backward:
            gradients = self._backward(arguments, last_backward)
        else:
            gradients = self._backward_to_inputs(bwd_chunk_id, arguments, last_backward)
        self._hand_back(bwd_chunk_id, gradients, owed)
        for key in self.plan.kept[self.stage_index]:
            self.store.release(bwd_chunk_id, key)

    def _backward_to_inputs(self, micro_batch: int, arguments: dict[str, Any], last_backward: bool) -> Any:
        """The half of a backward pass that the stage before waits for; `backward_weight_one_chunk` does the other.

        Both halves are done here where apart they would be wrong or waste: with activation checkpointing, which would
        recompute the stage for every group of weights; where an input needs no gradient, since a weight's group is
        found on the way from its gradient to the inputs; where a strategy's weights enter a graph in several places.
        """
        if not self._can_split(arguments["input_values"]):
            self._whole.add(micro_batch)
            return self._backward(arguments, last_backward)
        gradients, groups = (None,) * len(arguments["input_values"]), None
        if not self.is_first:  # there the other half is all of it
            if self.is_last:
                arguments["stage_output"] = (arguments["stage_output"],)
            gradients, groups = self._guarded("input", arguments, last_backward)
        roots, root_grads = arguments["stage_output"], arguments["output_grads"]
        self.backward_state[micro_batch] = (arguments["input_values"], groups, roots, root_grads)
        self.dw_runner[micro_batch] = _nothing
        return gradients

    def _can_split(self, inputs: Sequence[Tensor]) -> bool:
        if self.is_first:
            return True
        return (
            not _is_checkpointed(self.submod)
            and all(each.requires_grad for each in inputs if each.is_floating_point())
            and self.part.decoder.base_model.residual.strategy.weights_meet_once
        )

    def _backward(self, arguments: dict[str, Any], last_backward: bool) -> Any:
        """The whole backward pass; returns the gradients of the inputs."""
        roots = arguments["stage_output"]
        if isinstance(roots, tuple) and not roots:  # nothing here is trained, and nothing before it
            return (None,) * len(arguments["input_values"])
        return self._guarded("full", arguments, last_backward)[0]

    def _guarded(self, kind: str, arguments: dict[str, Any], last_backward: bool) -> Any:
        """PyTorch's own backward pass of a stage; an error in it is raised as it was, not as a list of tensors."""
        try:
            return self.backward_maybe_with_nosync(kind, arguments, last_backward=last_backward)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The other half, unless it has been done."""
        if bwd_chunk_id in self._whole:
            self._whole.remove(bwd_chunk_id)
        else:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            self.dw_runner.pop(bwd_chunk_id, None)

    def _collect(self, micro_batch: int, done: _Pass) -> dict[str, Tensor]:
        """What later stages owe to the tensors at the end of this one: over the next hop, and left on this rank."""
        owed = {} if self.is_last else self._owed.pop(micro_batch, {})
        keys = {*done.outputs, *self.shapes} if len(self._local_stages) > 1 else set()
        for key in sorted(keys):
            left = self.store.collect(micro_batch, key)
            if left is not None:
                owed[key] = left + owed[key] if key in owed else left
        return owed

    def _roots(
        self, outputs: Mapping[str, Tensor], owed: Mapping[str, Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Where the backward pass of the stage starts, and with which gradients.

        A sum that is wider than a tensor that the stage was given starts no graph: `_total` adds it at the end, so that
        it is not rounded. For a tensor that the stage made this is where its sum is rounded, once.
        """
        roots, gradients = [], []
        for key, tensor in outputs.items():
            gradient = owed.get(key)
            if gradient is None or not tensor.requires_grad:
                continue
            if key in self.shapes and gradient.dtype != tensor.dtype:
                continue
            roots.append(_Root.apply(tensor))
            gradients.append(gradient.to(tensor.dtype))
        return tuple(roots), tuple(gradients)

    def _hand_back(self, micro_batch: int, gradients: Sequence[Tensor | None], owed: Mapping[str, Tensor]) -> None:
        """Make the sums ready for the hop that brought the tensors, or leave them on the rank."""
        if self.hop is None:
            return
        brought = {leaf.key for leaf in self.hop.leaves}
        owing = self._owing[micro_batch] = {}
        for leaf, gradient in zip(self.plan.incoming(self.stage_index).leaves, gradients, strict=False):
            shape = self.shapes[leaf.key]
            if not shape.requires_grad:
                continue
            total = _total(gradient, owed.get(leaf.key), shape, leaf)
            if leaf.key in brought:
                owing[leaf.key] = self._zeros(shape, leaf) if total is None else total
            elif total is not None:
                self.store.deposit(micro_batch, leaf.key, total)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradients of what the hop brought, each once."""
        if not self.has_backward or self.hop is None:
            return []
        owing = self._owing.pop(bwd_chunk_id)
        sent = [(leaf, owing[leaf.key].contiguous()) for leaf in self._with_gradient(self.hop, self.shapes)]
        return self._send("backward", self.hop, self.stage_index - 1, bwd_chunk_id, sent)

    # -- the step ----------------------------------------------------------------------------------------------------

    def clear_runtime_states(self) -> None:
        """Forget what a step left behind, whole or broken off."""
        super().clear_runtime_states()
        for held in (self._passes, self._arriving, self._owed, self._owing, self.backward_state, self.dw_runner):
            held.clear()
        self._whole.clear()
        self.bwd_cache.clear()
        if self.stage_index == self._local_stages[0]:
            self.store.clear()

    def held(self) -> list[Tensor]:
        """The tensors of states that this stage holds now."""
        tensors = [tensor for done in self._passes.values() for tensor in done.outputs.values()]
        if not self.is_first:
            tensors += [tensor for done in self._passes.values() for tensor in done.inputs]
        return tensors + _values(self._arriving)

    def held_gradients(self) -> list[Tensor]:
        """The gradients on their way through this stage."""
        return _values(self._owed) + _values(self._owing)

    def _send(self, direction: Any, hop: Hop, to_stage: int, micro_batch: int, sent: Any) -> list[dist.P2POp]:
        peer = self._resolve_peer_global_rank(to_stage)
        for leaf, tensor in sent:
            self.ledger.note(direction, hop, micro_batch, leaf, tensor)
        return [dist.P2POp(dist.isend, tensor, peer, self.group) for _, tensor in sent]

    @staticmethod
    def _with_gradient(hop: Hop, shapes: Mapping[str, Shape]) -> list[Leaf]:
        return [leaf for leaf in hop.leaves if shapes[leaf.key].requires_grad]

    def _empty(self, shape: Shape) -> Tensor:
        return torch.empty(shape.size, dtype=shape.dtype, device=self.device)

    def _zeros(self, shape: Shape, leaf: Leaf) -> Tensor:
        return torch.zeros(shape.size, dtype=shape.gradient_dtype(leaf), device=self.device)


class _Root(torch.autograd.Function):
    """A tensor of its own at the end of a graph, where a gradient from outside comes in.

    What a stage puts out may be something that it was given, or a view; autograd can start from neither twice.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _total(gradient: Tensor | None, owed: Tensor | None, shape: Shape, leaf: Leaf) -> Tensor | None:
    """What is owed to a tensor at the start of a stage, in the dtype that it travels in."""
    wide = shape.gradient_dtype(leaf)
    own = None if gradient is None else gradient.to(wide)
    if owed is None or owed.dtype == shape.dtype:  # then it went through the graph, in the order of one process
        return own
    return owed if own is None else owed + own


def _values(waiting: Mapping[int, Mapping[str, Tensor]]) -> list[Tensor]:
    return [tensor for buffers in waiting.values() for tensor in buffers.values()]


def _unwrapped(module: nn.Module) -> nn.Module:
    """Without the wrapper that counts passes."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def _is_checkpointed(module: nn.Module) -> bool:
    return module.training and any(getattr(part, "gradient_checkpointing", False) for part in module.modules())


def _nothing() -> None:
    """What is left to do for the weights once `PipelineStage.backward_weight_one_chunk` has done it."""
