"""A decoder layer that reads and writes a residual state instead of adding to a hidden-state tensor.

It holds the same child modules under the same names as the layer it replaces, so parameter names do not change, and it
stands in the same loop of the model's own forward, so masks, positions, caches and checkpointing stay Transformers'.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from attnres.errors import UnsupportedModelError
from attnres.models.families import Arguments, Family
from attnres.residual import OUTPUT, Residual


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

    Args:
        layer: The layer to take over; its children are shared, not copied.
        family: How the layer is decomposed.
        residual: The model's residual path; referred to, not owned, so its parameters have one name.
        index: Position of the layer; the first one starts the state from the embedding.
    """

    _compiled: tuple[Callable[..., Tensor], Callable[..., Tensor]] | None = None

    def __init__(self, layer: nn.Module, family: Family, residual: Residual, index: int):
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        for name, child in layer.named_children():
            self.add_module(name, child)
        self.tap = HiddenStateTap()
        self.training = layer.training
        self.is_first = index == 0
        self.family = family
        # in tuples, so that they are referred to and not owned
        self._residual = (residual,)
        self._sites = (residual.site(2 * index), residual.site(2 * index + 1))
        if "_gradient_checkpointing_func" in vars(layer):  # checkpointing was switched on before conversion
            self._gradient_checkpointing_func = vars(layer)["_gradient_checkpointing_func"]

    def forward(self, hidden_states: Any, **arguments: Any) -> Any:
        """Run both sublayers; takes and returns the state (the first layer takes the embedding)."""
        (residual,) = self._residual
        attention_site, mlp_site = self._sites
        attend, transform = self._compiled or (self._attend, self._transform)
        if self.is_first and residual.strategy.crosses_tokens:
            refuse_cached_step(residual, arguments)
        state = residual.start(hidden_states) if self.is_first else hidden_states
        hidden = residual.read(state, attention_site)
        self.tap(hidden if attention_site.views == 1 else hidden[..., 0, :])
        state = residual.write(state, attention_site, attend(hidden, arguments))
        hidden = residual.read(state, mlp_site)
        return residual.write(state, mlp_site, transform(hidden))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the two sublayers, each with its norm; the arguments are those of `torch.compile`.

        Reads and writes stay outside, where their operators are fused already. A graph of the whole layer would be made
        anew for every number of sources and every place in a block, and Dynamo gives up after eight; so layers of one
        kind share two graphs, however deep the model. That is for calls with ``use_cache=False``, as in training: a
        cache has the layer's number in the graph, in a plain model too. A copy or pickle of the layer is not compiled.
        """
        self._compiled = (
            torch.compile(self._attend, *args, **kwargs),
            torch.compile(self._transform, *args, **kwargs),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_compiled"}

    def _attend(self, hidden: Tensor, arguments: Arguments) -> Tensor:
        family, site = self.family, self._sites[0]
        normed = hidden if site.takes_norm else getattr(self, family.attention_norm)(hidden)
        if site.views > 1:
            normed = normed.flatten(-2)  # query, key and value projections each take their part
        output = getattr(self, family.attention)(hidden_states=normed, **family.attention_arguments(self, arguments))
        return output[0] if isinstance(output, tuple) else output

    def _transform(self, hidden: Tensor) -> Tensor:
        family = self.family
        normed = hidden if self._sites[1].takes_norm else getattr(self, family.mlp_norm)(hidden)
        return getattr(self, family.mlp)(normed)

    @property
    def _gradient_checkpointing_func(self) -> Callable[..., Any]:
        """Transformers sets and calls this; the state has to be laid out flat in between."""
        return lambda function, state: checkpoint_state(self._checkpoint, function, state)

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


def read_before(norm: Any, residual: Residual) -> None:
    """Make a model's final norm read the output from the state it is now given, before it normalises.

    A hook rather than a wrapper: the norm keeps its class, its parameter names and any kernel swapped in for it. Given
    a tensor, as when hidden states are looked at through the head, the norm does what it always did.
    """
    norm.tap = HiddenStateTap()
    norm._residual = (residual,)  # a tuple, so that the residual is referred to and not owned
    norm.register_forward_pre_hook(_read_output)


def _read_output(norm: Any, arguments: tuple[Any, ...]) -> tuple[Tensor] | None:
    (state,) = arguments
    if isinstance(state, Tensor):
        return None
    return (norm.tap(norm._residual[0].read(state, OUTPUT)),)
