"""Model classes for converted models: the family's own class, told about sites and taps.

A converted model stays an instance of its family's class. The derived class adds three things that Transformers looks
up on classes: how our parameters are initialised, what ``output_hidden_states`` records, and which layer class must not
be split across devices.
"""

from functools import cache
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing
from transformers.utils.output_capturing import OutputRecorder

from attnres.errors import UnsupportedModelError
from attnres.models.layer import HiddenStateTap, ResidualDecoderLayer
from attnres.residual import Site

PREFIX = "AttnRes"


class AttnResMixin:
    """What a converted model adds to its family's class."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the family's own loading knows nothing of the strategy and would drop its parameters."""
        base = cls.__name__.removeprefix(PREFIX)
        raise UnsupportedModelError(
            f"{cls.__name__}.from_pretrained would drop the strategy; build the model from its config, convert it, and "
            f"load the state dict into that ({base} loads the weights as a plain model)"
        )

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Site):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # pyright: ignore[reportAttributeAccessIssue]


@cache
def converted_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of a converted ``base``, such as ``AttnResLlamaForCausalLM``."""
    hidden_states = OutputRecorder(
        HiddenStateTap, capture_initial_hidden_state=False, num_hidden_layers_key="num_hidden_states"
    )
    attributes = {
        "__module__": __name__,
        "__doc__": f"`{base.__name__}` with a residual strategy.",
        "_can_record_outputs": {**(base._can_record_outputs or {}), "hidden_states": hidden_states},
        "_no_split_modules": [*(base._no_split_modules or ()), ResidualDecoderLayer.__name__],
    }
    return type(PREFIX + base.__name__, (AttnResMixin, base), attributes)


def adopt(model: PreTrainedModel) -> None:
    """Turn a model, in place, into an instance of its converted class."""
    model.__class__ = converted_class(type(model))
    output_capturing._CAN_RECORD_REGISTRY[model] = model._can_record_outputs
    if getattr(model, "_output_capturing_hooks_installed", False):  # by an earlier call; the layers it hooked are gone
        recorder = (model._can_record_outputs or {})["hidden_states"]
        output_capturing.recursively_install_hooks(model, "", [("hidden_states", recorder)])


def __getattr__(name: str) -> Any:  # so that a pickled model finds its class again
    base = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if isinstance(base, type) and issubclass(base, PreTrainedModel):
        return converted_class(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
