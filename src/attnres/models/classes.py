"""Model classes for converted models: the family's own class, told about the residual path.

A converted model stays an instance of its family's class. The derived class adds what Transformers looks up on
classes: how a model is made from its config, how our parameters are initialised, what ``output_hidden_states`` records,
and which layer class must not be split across devices.
"""

from functools import cache
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.utils import output_capturing
from transformers.utils.output_capturing import OutputRecorder

from attnres.errors import CheckpointError, ConfigError
from attnres.models.config import PREFIX, AttnResConfigMixin, config_class, family_class, parse_strategy
from attnres.models.families import Family, known_family
from attnres.models.install import install
from attnres.models.layer import HiddenStateTap, ResidualDecoderLayer
from attnres.models.remote.write import names_remote_code, write_remote_code
from attnres.residual import Site

AUTO_CLASSES: tuple[Any, ...] = (
    transformers.AutoModel,
    transformers.AutoModelForCausalLM,
    transformers.AutoModelForSequenceClassification,
    transformers.AutoModelForTokenClassification,
    transformers.AutoModelForQuestionAnswering,
)
"""Auto classes that find converted models."""


class AttnResMixin:
    """What a converted model adds to its family's class."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        if not isinstance(config, AttnResConfigMixin):
            raise ConfigError(
                f"config is a {type(config).__name__}; allowed is that of a converted model (attnres.convert)"
            )
        super().__init__(config, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        base: Any = self.base_model  # pyright: ignore[reportAttributeAccessIssue]
        if not hasattr(base, "residual"):  # heads of Transformers' generic kind make it by the auto class
            install(base, family_in(config, base), parse_strategy(getattr(config, "attnres", None)))
        parts: list[Any] = [self] if base is self else [self, base]
        for part in parts:
            adopt(part)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load a converted model, completely: every parameter of the strategy has to be there.

        As in Transformers, and besides:

        Raises:
            CheckpointError: Weights of the residual path are missing, unknown or of another shape. (Transformers would
                start these anew, with a warning.)
        """
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        check_loaded(cls.__name__, info)
        check_placed(model)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the model; with the code for readers without attnres where its config names that."""
        super().save_pretrained(save_directory, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        config: Any = self.config  # pyright: ignore[reportAttributeAccessIssue]
        if names_remote_code(config):
            write_remote_code(save_directory)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Whether Transformers should mistrust names of weights: no, they are the family's."""
        return False

    def _init_weights(self, module: Any) -> None:
        if isinstance(module, Site):
            if not all(getattr(parameter, "_is_hf_initialized", False) for parameter in module.parameters()):
                module.reset_parameters()  # not what has been loaded: Transformers asks for that, too
        else:
            super()._init_weights(module)  # pyright: ignore[reportAttributeAccessIssue]


def check_loaded(name: str, info: Any) -> None:
    """Refuse a checkpoint that does not have exactly the residual parameters of its config.

    Raises:
        CheckpointError: With the names.
    """
    problems = {
        "missing": [key for key in info["missing_keys"] if _is_residual(key)],
        "not in this model": [key for key in info["unexpected_keys"] if _is_residual(key)],
        "of another shape": [str(key[0]) for key in info.get("mismatched_keys", ()) if _is_residual(str(key[0]))],
    }
    found = "; ".join(f"{what}: {', '.join(sorted(keys))}" for what, keys in problems.items() if keys)
    if found:
        raise CheckpointError(f"the weights do not fit the strategy in the config of this {name}: {found}")


def check_placed(model: Any) -> None:
    """Refuse a device map that offloads the residual path, or that spreads the layers over several devices.

    What flows between the layers is a state and not a tensor, and every layer reads its sites at its own place.

    Raises:
        CheckpointError: It does.
    """
    places = getattr(model, "hf_device_map", None)
    several = sorted({str(place) for place in (places or {}).values() if str(place) not in ("cpu", "disk")})
    if len(several) > 1:
        raise CheckpointError(
            f"device_map spreads the layers over {', '.join(several)}; "
            "allowed is one device, with offload to cpu and disk"
        )
    if places and any(parameter.is_meta for parameter in model.base_model.residual.parameters()):
        told = {name: place for name, place in places.items() if "residual" in name or name == ""}
        raise CheckpointError(
            f"device_map offloads the residual path ({told}); allowed is to keep it on a device, "
            "since every layer reads it; it is small"
        )


def _is_residual(name: str) -> bool:
    return "residual" in name.split(".")


def family_in(config: Any, base: Any) -> Family:
    """The family of a model that is made from a config: the one described there, else the known one.

    Raises:
        ConfigError: There is neither.
    """
    described = getattr(config, "attnres_family", None)
    if described is not None:
        return Family.from_dict(described)
    family = known_family(base)
    if family is not None:
        return family
    raise ConfigError(f"{type(base).__name__} is no known family, and its config does not describe it (attnres_family)")


@cache
def converted_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of a converted ``base``, such as ``AttnResLlamaForCausalLM``."""
    hidden_states = OutputRecorder(
        HiddenStateTap, capture_initial_hidden_state=False, num_hidden_layers_key="num_hidden_states"
    )
    attributes = {
        "__module__": __name__,
        "__doc__": f"`{base.__name__}` with a residual strategy.",
        "config_class": config_class(base.config_class),
        "_can_record_outputs": {**(base._can_record_outputs or {}), "hidden_states": hidden_states},
        "_no_split_modules": [*(base._no_split_modules or ()), ResidualDecoderLayer.__name__, "Residual"],
    }
    renamed = get_checkpoint_conversion_mapping(base.__name__)
    if renamed is not None:  # weights have other names in files, and Transformers knows by the name of the class
        register_checkpoint_conversion_mapping(PREFIX + base.__name__, renamed, overwrite=True)
    return type(PREFIX + base.__name__, (AttnResMixin, base), attributes)


def adopt(model: PreTrainedModel) -> None:
    """Turn a model, in place, into an instance of its converted class."""
    if not isinstance(model, AttnResMixin):
        model.__class__ = converted_class(type(model))
    _record_outputs(model)


def release(model: PreTrainedModel) -> None:
    """The inverse of `adopt`."""
    model.__class__ = family_class(type(model))
    _record_outputs(model)


def register(config: type[PreTrainedConfig]) -> None:
    """Let Transformers' auto classes find the models of a converted config class. Done when such a config is loaded."""
    family = family_class(config)
    for auto in AUTO_CLASSES:
        mapping = auto._model_mapping
        if family in mapping and config not in mapping:
            base = mapping[family]
            mapping.register(config, converted_class(base[0] if isinstance(base, tuple) else base))


def _record_outputs(model: PreTrainedModel) -> None:
    """Let Transformers record what the class says; hooks that an earlier call left are made anew by the next."""
    output_capturing._CAN_RECORD_REGISTRY[model] = model._can_record_outputs
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__name__", "") == "output_capturing_hook":
                del module._forward_hooks[key]
        if "_output_capturing_hooks_installed" in vars(module):
            vars(module)["_output_capturing_hooks_installed"] = False


def __getattr__(name: str) -> Any:  # so that a pickled model finds its class again
    base = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if isinstance(base, type) and issubclass(base, PreTrainedModel):
        return converted_class(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
