"""A decoder layer that reads and writes a residual state instead of adding to a hidden-state tensor.

It holds the same child modules under the same names as the layer it replaces, so parameter names do not change, and it
stands in the same loop of the model's own forward, so masks, positions, caches and checkpointing stay Transformers'.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from attnres.errors import UnsupportedModelError
from attnres.models.families import Arguments, Family, SublayerParts
from attnres.models.norms import is_plain, note_norm
from attnres.residual import OUTPUT, Residual, Site


class HiddenStateTap(nn.Module):
    """Passes a read on unchanged: the place where ``output_hidden_states`` listens.

    What flows between layers is a state, not a tensor, so Transformers' hooks on layers have nothing to record. Entry
    ``k`` of the hidden states is what layer ``k`` reads before its norm (where query, key and value each have a read,
    the query's); the last is the model's final hidden state.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``hidden``."""
        return hidden


class ResidualDecoderLayer(GradientCheckpointingLayer):
    """One decoder layer: an attention and an MLP sublayer around a residual strategy.

    Where a family runs the two in parallel, they are one sublayer: one read for both, and one write of their sum.
    Children are taken from ``_modules``: looking one up as an attribute takes longer than a short read does.

    Args:
        layer: The layer to take over; its children are shared, not copied.
        family: How the layer is decomposed.
        residual: The model's residual path; referred to, not owned, so its parameters have one name.
        first_site: Index of the site where the layer reads first; at 0 it starts the state from the embedding.
        owner: The module that has ``residual`` as an attribute, where an adapter may put its own copy of it.
    """

    _compiled: tuple[Callable[..., Tensor], ...] | None = None

    def __init__(
        self,
        layer: nn.Module,
        family: Family,
        residual: Residual,
        first_site: int,
        owner: nn.Module | None = None,
    ):
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        for name, child in layer.named_children():
            self.add_module(name, child)
        self.tap = HiddenStateTap()
        self.training = layer.training
        self.is_first = first_site == 0
        self._present: tuple[int, ...] = tuple(range(family.sublayers(layer)))
        self.family = family
        self.is_parallel = family.is_parallel(layer)
        self._argument_names = tuple(inspect.signature(type(layer).forward).parameters)[2:]
        # in tuples, so that they are referred to and not owned
        self._original: tuple[nn.Module, ...] = (layer,)
        self._owner = (owner,)
        self._residual = (residual,)
        self._places = tuple(range(first_site, first_site + family.sublayers(layer)))
        self._sites = tuple(map(residual.site, self._places))
        for parts in (family.attention, family.mlp):
            note_norm(None if parts.norm is None else getattr(self, parts.norm))
        if "_gradient_checkpointing_func" in vars(layer):  # checkpointing was switched on before conversion
            self._gradient_checkpointing_func = vars(layer)["_gradient_checkpointing_func"]

    def forward(self, hidden_states: Any, *positional: Any, **arguments: Any) -> Any:
        """Run the sublayers; takes and returns the state (the first layer takes the embedding)."""
        if positional:
            arguments |= zip(self._argument_names, positional, strict=False)
        residual, sites = self._path()
        if self.is_first and residual.strategy.crosses_tokens:
            refuse_cached_step(residual, arguments)
        state = residual.start(hidden_states) if self.is_first else hidden_states
        runs = self._compiled or self._runs()
        for at in self._present:
            site, run = sites[at], runs[at]
            fused = self._fused_norm(at, site)
            if fused is None:
                hidden = residual.read(state, site)
                if at == 0:
                    self.tap(hidden if site.views == 1 else hidden[..., 0, :])
                output = run(hidden, arguments)
            else:
                hidden, state = residual.read_normed(state, site, fused._parameters["weight"], fused.variance_epsilon)
                output = run(hidden, arguments, normed=True)
            state = residual.write(state, site, output)
        return state

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the sublayers, each with its norm; the arguments are those of `torch.compile`.

        Reads and writes stay outside, where their operators are fused already. A graph of the whole layer would be made
        anew for every number of sources and every place in a block, and Dynamo gives up after eight; so layers of one
        kind share two graphs, however deep the model. That is for calls with ``use_cache=False``, as in training: a
        cache has the layer's number in the graph, in a plain model too. A copy or pickle of the layer is not compiled.
        """
        self._compiled = tuple(torch.compile(run, *args, **kwargs) for run in self._runs())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_compiled"}

    @property
    def places(self) -> tuple[int, ...]:
        """Indices of the sites where the layer's sublayers read."""
        return self._places

    def keep(self, present: Sequence[int]) -> None:
        """Keep only some of the sublayers, as where a pipeline is cut inside the layer; the parts of the others go.

        Args:
            present: Which of the layer's sublayers: 0 is its first.
        """
        self._present = tuple(present)
        self.is_first = self.is_first and 0 in self._present
        self._sites = tuple(site if at in self._present else Site() for at, site in enumerate(self._sites))
        self._original = ()  # the whole layer holds what is not kept
        if not self.is_parallel:
            for at, parts in enumerate((self.family.attention, self.family.mlp)):
                for name in parts.names if at not in self._present else ():
                    self._modules[name] = None

    def original(self) -> nn.Module:
        """The layer that was taken over, with the children that this one has by now."""
        (layer,) = self._original
        for name, _ in list(layer.named_children()):
            layer.add_module(name, getattr(self, name))
        layer.training = self.training
        if "_checkpoint" in vars(self):
            vars(layer)["_gradient_checkpointing_func"] = self._checkpoint
        if "gradient_checkpointing" in vars(self):
            vars(layer)["gradient_checkpointing"] = self.gradient_checkpointing
        return layer

    def _path(self) -> tuple[Residual, tuple[Site, ...]]:
        """The residual path and the sites of this layer; those of an adapter where one has been put in."""
        (residual,), (owner,) = self._residual, self._owner
        if owner is None:
            return residual, self._sites
        found: Any = owner._modules["residual"]
        if found is residual:
            return residual, self._sites
        return found, tuple(map(found.site, self._places))

    def _runs(self) -> tuple[Callable[..., Tensor], ...]:
        """What stands between read and write, for each sublayer."""
        return (self._attend_and_transform,) if self.is_parallel else (self._attend, self._transform)

    def _fused_norm(self, at: int, site: Site) -> Any:
        """The norm that the read of a sublayer is to do as well, in inference; None where it stays the norm's.

        Not in training, even without gradients: a checkpointed layer runs once without and once with them, and both
        have to round alike.
        """
        if self.training or torch.is_grad_enabled() or self.is_parallel or self._compiled is not None:
            return None
        parts = self.family.attention if at == 0 else self.family.mlp
        if parts.norm is None or site.takes_norm or site.views > 1 or (at == 0 and self.tap._forward_hooks):
            return None
        norm = self._modules[parts.norm]
        return norm if is_plain(norm) else None

    def _attend(self, hidden: Tensor, arguments: Arguments, *, normed: bool = False) -> Tensor:
        family, site = self.family, self._sites[0]
        hidden = hidden if normed else self._norm(hidden, family.attention, site)
        if site.views > 1:
            hidden = hidden.flatten(-2)  # query, key and value projections each take their part
        attention: Any = self._modules[family.attention.module]
        output = attention(hidden_states=hidden, **family.attention_arguments(attention, arguments))
        return self._finish(output[0] if isinstance(output, tuple) else output, family.attention)

    def _transform(self, hidden: Tensor, arguments: Arguments, *, normed: bool = False) -> Tensor:
        del arguments
        family = self.family
        hidden = hidden if normed else self._norm(hidden, family.mlp, self._sites[-1])
        transform: Any = self._modules[family.mlp.module]
        output = transform(hidden)
        return self._finish(output[0] if isinstance(output, tuple) else output, family.mlp)

    def _attend_and_transform(self, hidden: Tensor, arguments: Arguments) -> Tensor:
        return self._attend(hidden, arguments) + self._transform(hidden, arguments)

    def _norm(self, hidden: Tensor, parts: SublayerParts, site: Site) -> Tensor:
        return hidden if parts.norm is None or site.takes_norm else getattr(self, parts.norm)(hidden)

    def _finish(self, output: Tensor, parts: SublayerParts) -> Tensor:
        for name in (parts.output_norm, parts.dropout):
            output = output if name is None else getattr(self, name)(output)
        return output

    @property
    def _gradient_checkpointing_func(self) -> Callable[..., Any]:
        """Transformers sets and calls this; the state has to be laid out flat in between."""
        return lambda function, state, *others: checkpoint_state(
            self._checkpoint, lambda state: function(state, *others), state
        )

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, checkpoint: Callable[..., Any]) -> None:
        self._checkpoint = checkpoint


def refuse_cached_step(residual: Residual, arguments: Arguments) -> None:
    """Refuse to go on from a KV cache with a strategy that would need the earlier positions, which are gone.

    Raises:
        UnsupportedModelError: The cache holds earlier positions.
    """
    for cache in arguments.values():  # by its kind, since Transformers has renamed the argument
        if isinstance(cache, Cache) and cache.get_seq_length() > 0:
            raise UnsupportedModelError(
                f"{residual.strategy.label} looks at other positions and keeps no cache of its own, but the KV cache "
                f"holds {int(cache.get_seq_length())} of them; allowed is use_cache=False"
            )


def checkpoint_state(checkpoint: Callable[..., Any], function: Callable[[Any], Any], state: Any) -> Any:
    """Run ``function(state)`` under an activation checkpoint that sees the state's tensors as plain arguments.

    Reentrant checkpointing gives gradients only to tensors that are arguments themselves, not to tensors inside one.
    """
    leaves, spec = pytree.tree_flatten(state)
    specs = []

    def flat(*leaves: Any) -> tuple[Any, ...]:
        result, result_spec = pytree.tree_flatten(function(pytree.tree_unflatten(leaves, spec)))
        specs.append(result_spec)
        return tuple(result)

    result = checkpoint(flat, *leaves)
    return pytree.tree_unflatten(result, specs[0])


def read_before(norm: Any, owner: nn.Module) -> None:
    """Make a model's final norm read the output from the state it is now given, before it normalises.

    ``owner`` is the module that has the residual path as an attribute. A hook rather than a wrapper: the norm keeps its
    class, its parameter names and any kernel swapped in for it. Given a tensor, as when hidden states are looked at
    through the head, the norm does what it always did.
    """
    norm.tap = HiddenStateTap()
    norm._owner = (owner,)  # a tuple, so that it is referred to and not owned
    norm.register_forward_pre_hook(_read_output)


def read_no_more(norm: Any) -> None:
    """Undo `read_before`, where it was done: a norm that has been put in since needs nothing."""
    for key, hook in list(norm._forward_pre_hooks.items()):
        if hook is _read_output:
            del norm._forward_pre_hooks[key]
    norm._modules.pop("tap", None)
    vars(norm).pop("_owner", None)


def _read_output(norm: Any, arguments: tuple[Any, ...]) -> tuple[Tensor] | None:
    (state,) = arguments
    if isinstance(state, Tensor):
        return None
    return (norm.tap(norm._owner[0].residual.read(state, OUTPUT)),)
