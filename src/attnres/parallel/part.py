"""One stage of a pipeline as a module: the model itself, with everything that other stages have taken out.

The model keeps its own forward, with its masks and positions; layers, norms and tables of other stages make room for
placeholders. So every parameter has the name that it has in the whole model, and a checkpoint knows nothing of stages.
The cut may lie anywhere between two sublayers, also inside a decoder layer.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import UnsupportedModelError
from attnres.models.convert import converted_base
from attnres.models.install import family_of_converted
from attnres.models.layer import ResidualDecoderLayer
from attnres.parallel.plan import PipelinePlan
from attnres.parallel.tokens import DividedTokens
from attnres.residual import Residual
from attnres.residual.site import Site
from attnres.residual.state import tensors as tensors_of


class StagePart(nn.Module):
    """The part of a converted model that one stage runs.

    Takes the token ids ``[B, T]`` (first stage) or the tensors of the state at its start, and returns those of the
    state at its end, or the logits ``[B, T, vocabulary]`` (last stage). Of a parallelized model the tensors of a state
    are those of the rank's own tokens. Keyword arguments, such as ``attention_mask`` and ``position_ids``, go to the
    model's own forward.

    Args:
        model: A converted model; its modules are not changed, and its tensors are shared, not copied.
        plan: The pipeline.
        stage: Index of the stage.
        tokens: Where the ranks of the stage share its tokens: how many there are together.
        reads_ahead: Whether reads may be in two phases. In a split backward pass they may not: gradients of weights are
            then computed group by group, and a pseudo-query that takes part in two phases is in no one group.

    Raises:
        UnsupportedModelError: The model has something besides its layers that cannot be left out.
    """

    def __init__(
        self,
        model: Any,
        plan: PipelinePlan,
        stage: int,
        *,
        tokens: DividedTokens | None = None,
        reads_ahead: bool = True,
    ):
        super().__init__()
        self._tokens = tokens
        self.stage, self.plan = stage, plan
        self.is_first, self.is_last = stage == 0, stage == plan.num_stages - 1
        self.dim = model.get_input_embeddings().weight.shape[-1]
        self.stream_dtype = model.get_input_embeddings().weight.dtype
        self.decoder: Any = share_structure(model)
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Entered around each run of the stage."""
        self._incoming: list[Any] = []
        self._outgoing: list[Any] = []
        self._upcoming: tuple[Site, ...] = ()
        self._reads_ahead = reads_ahead
        self._leave_out()

    def forward(self, *tensors: Tensor, **arguments: Any) -> Any:
        """Run the stage."""
        run = self.decoder if self.is_last else self.decoder.base_model
        try:
            with self.autocast():
                result = run(**self._enter(tensors), use_cache=False, **arguments)
            if self.is_last:
                return result.logits if hasattr(result, "logits") else result.last_hidden_state
            return self.plan.outgoing(self.stage).flatten(self._outgoing.pop())
        finally:
            self._incoming.clear()
            self._outgoing.clear()

    def _enter(self, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """What the model's forward is given: token ids, or the state and something of the shape of an embedding."""
        if self.is_first:
            return {"input_ids": tensors[0]}
        state = self.plan.incoming(self.stage).unflatten(tensors)
        residual: Residual = self.decoder.base_model.residual
        self._incoming.append(residual.strategy.resume(state, self._upcoming))
        batch = (tensors[0].shape[0], tensors[0].shape[1] if self._tokens is None else self._tokens.count)
        return {"inputs_embeds": tensors[0].new_zeros(1, dtype=self.stream_dtype).expand(*batch, self.dim)}

    def _leave_out(self) -> None:
        base = converted_base(self.decoder)
        family = family_of_converted(base)
        self._check_head(base)
        first, stop = self.plan.span(self.stage)
        layers: Any = getattr(base, family.layers)
        own = []
        for index, layer in enumerate(layers):
            present = [at for at, place in enumerate(layer.places) if first <= place < stop]
            if present:
                layer.keep(present)
                own.append(layer)
            else:
                layers[index] = Elsewhere(layer)
        self._leave_out_sites(base.residual, first, stop)
        if not self.is_first:
            own[0].__class__ = EntryLayer
            own[0].incoming = self._incoming
            if self._tokens is not None:
                self._tokens.leave_start(own[0])
            self._leave_out_tables(base)
        if not self.is_last:
            setattr(base, family.norm, _Exit(self._outgoing, self.dim))
            _leave_out_module(self.decoder, self.decoder.get_output_embeddings())

    def _check_head(self, base: Any) -> None:
        head = self.decoder.get_output_embeddings()
        for name, child in self.decoder.named_children() if self.decoder is not base else ():
            if child is not base and child is not head and any(True for _ in child.parameters()):
                raise UnsupportedModelError(
                    f"{type(self.decoder).__name__}.{name} has parameters and is no language-model head; allowed in a "
                    "pipeline: a causal language model, or a model without head"
                )

    def _leave_out_sites(self, residual: Residual, first: int, stop: int) -> None:
        last = residual.num_sublayers if self.is_last else stop - 1
        entry = residual.site(first)
        ahead = last if self._reads_ahead else -1
        groups = [getattr(residual.site(index), "upcoming", ()) for index in range(first)]
        self._upcoming = next(
            (tuple(s for s in group if first <= s.index <= ahead) for group in groups if entry in group), ()
        )
        for index in range(residual.num_sublayers + 1):
            site: Any = residual.site(index)
            if first <= index <= last:
                if getattr(site, "upcoming", ()):
                    site.upcoming = tuple(s for s in site.upcoming if s.index <= ahead)
            else:
                residual.sites[index] = Site()

    def _leave_out_tables(self, base: Any) -> None:
        """Whatever is used before the first layer: the token embedding, learned positions."""
        embedding = base.get_input_embeddings()
        kept = {id(base.residual)}
        for name, child in list(base.named_children()):
            if child is embedding:
                if not (self.is_last and is_tied(self.decoder)):
                    base._modules[name] = None
            elif isinstance(child, nn.Embedding):
                base._modules[name] = _NoPositions()
            elif id(child) not in kept and not _belongs_to_layers(child) and any(True for _ in child.parameters()):
                raise UnsupportedModelError(
                    f"{type(base).__name__}.{name} has parameters and is no layer, embedding or final norm; a "
                    "pipeline cannot leave it out of a stage"
                )


class EntryLayer(ResidualDecoderLayer):
    """The first layer of a stage: takes its state from the stage, whatever the model's loop hands over."""

    incoming: list[Any]

    def __call__(self, hidden_states: Any, *positional: Any, **arguments: Any) -> Any:
        """As of any layer; here, before activation checkpointing looks at the arguments."""
        return super().__call__(self.incoming.pop(), *positional, **arguments)


class Elsewhere(nn.Module):
    """A layer that another stage has: it hands on what it is given, and says of itself what the layer does."""

    def __init__(self, layer: ResidualDecoderLayer):
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and isinstance(value, str | int | float | bool):
                setattr(self, name, value)

    def forward(self, hidden_states: Any, *positional: Any, **arguments: Any) -> Any:
        """Return the state."""
        return hidden_states


class _Exit(nn.Module):
    """Where the final norm is in the whole model: takes the state out, and hands on a tensor of the usual shape."""

    def __init__(self, outgoing: list[Any], dim: int):
        super().__init__()
        self._outgoing, self._dim = outgoing, dim

    def forward(self, state: Any) -> Tensor:
        self._outgoing.append(state)
        first = tensors_of(state)[0]
        return first.new_zeros(1).expand(*first.shape[:2], self._dim)


class _NoPositions(nn.Module):
    """In place of learned positions, which the first stage has added."""

    def forward(self, positions: Tensor) -> Tensor:
        return positions.new_zeros((), dtype=torch.get_default_dtype())


def is_tied(model: Any) -> bool:
    """Whether the head is the embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and embedding is not None and head.weight is embedding.weight


def share_structure(model: Any) -> Any:
    """A copy of a model's modules with the same tensors in them."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _belongs_to_layers(child: nn.Module) -> bool:
    return isinstance(child, nn.ModuleList) or hasattr(child, "_owner")  # the layers, or the norm with the output read


def _leave_out_module(root: nn.Module, wanted: nn.Module | None) -> None:
    if wanted is None:
        return
    for module in root.modules():
        for name, child in list(module._modules.items()):
            if child is wanted:
                module._modules[name] = None
