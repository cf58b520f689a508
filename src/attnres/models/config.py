"""The config of a converted model: the family's own, with the residual strategy in it.

In memory it is of a class derived from the family's, with the family's ``model_type``, so that whatever looks a model
up by that (weight conversions, LoRA targets) goes on working. On disk ``model_type`` is ``"attnres"`` and the family's
is ``base_model_type``: a reader that does not know attnres then says so, and does not load the model without its
residual path.
"""

import copy
from collections.abc import Mapping
from functools import cache
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from attnres.errors import CheckpointError, ConfigError
from attnres.residual import STRATEGIES, Strategy

PREFIX = "AttnRes"
MODEL_TYPE = "attnres"
BASE_MODEL_TYPE = "base_model_type"


def describe_strategy(strategy: Strategy) -> dict[str, Any]:
    """A strategy as JSON values, the way a converted model's config holds it.

    Without ``phases``, which is how the reads are computed and not what they are.
    """
    settings = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(strategy).items()
        if name != "phases"
    }
    return {"type": type(strategy).__name__, **settings}


def parse_strategy(description: Any) -> Strategy:
    """The inverse of `describe_strategy`.

    Raises:
        ConfigError: There is no such strategy, or a setting is unknown or not allowed.
    """
    classes = {cls.__name__: cls for cls in STRATEGIES.values()}
    if not isinstance(description, Mapping) or str(description.get("type")) not in classes:
        raise ConfigError(
            f"attnres is {description!r}; allowed is a dictionary whose type is one of {', '.join(classes)}"
        )
    settings = {name: value for name, value in description.items() if name != "type"}
    try:
        return classes[str(description["type"])](**settings)
    except TypeError as error:
        raise ConfigError(f"attnres is {description!r}; {error}") from error


class AttnResConfigMixin:
    """What a converted model's config adds to its family's."""

    @property
    def num_hidden_states(self) -> int:
        """Entries of ``output_hidden_states``: one per decoder layer, and the final one."""
        return self.num_hidden_layers + 1  # pyright: ignore[reportAttributeAccessIssue]

    def to_dict(self) -> dict[str, Any]:
        """The family's fields and the strategy, under attnres' own ``model_type``."""
        output = super().to_dict()  # pyright: ignore[reportAttributeAccessIssue]
        output[BASE_MODEL_TYPE] = output["model_type"]
        output["model_type"] = MODEL_TYPE
        return output

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The fields of a ``config.json``, with the family's ``model_type``."""
        config_dict, others = super().get_config_dict(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if config_dict.get("model_type") == MODEL_TYPE:
            config_dict["model_type"] = config_dict.pop(BASE_MODEL_TYPE, None)
        return config_dict, others

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """A config from `to_dict`'s fields."""
        own = {name: value for name, value in config_dict.items() if name not in ("model_type", BASE_MODEL_TYPE)}
        if own.get("attnres") is None:
            raise CheckpointError(f"the config names no residual strategy (attnres), which {cls.__name__} needs")
        parse_strategy(own["attnres"])
        return super().from_dict(own, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


def family_class(cls: type) -> Any:
    """The family's own class behind that of a converted model or its config."""
    return next(base for base in cls.__mro__ if not base.__name__.startswith(PREFIX))


@cache
def config_class(base: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The config class of converted models of a family, such as ``AttnResLlamaConfig``."""
    attributes = {"__module__": __name__, "__doc__": f"`{base.__name__}` with a residual strategy."}
    return type(PREFIX + base.__name__, (AttnResConfigMixin, base), attributes)


def config_from_dict(config_dict: Mapping[str, Any], **kwargs: Any) -> Any:
    """The config of a converted model from the fields of its ``config.json``.

    Raises:
        CheckpointError: The family or the strategy is missing or unknown.
    """
    kind = config_dict.get(BASE_MODEL_TYPE)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise CheckpointError(
            f"the config's {BASE_MODEL_TYPE} is {kind!r}; "
            f"allowed is a model_type of Transformers {transformers.__version__}"
        )
    return config_class(CONFIG_MAPPING[kind]).from_dict(dict(config_dict), **kwargs)


def plain_config(config: Any) -> Any:
    """The family's own config out of a converted model's, as a copy."""
    plain = copy.deepcopy(config)
    plain.__class__ = family_class(type(config))
    for name in ("attnres", "attnres_family"):
        vars(plain).pop(name, None)
    if plain.architectures:
        plain.architectures = [name.removeprefix(PREFIX) for name in plain.architectures]
    return plain


def __getattr__(name: str) -> Any:  # so that a pickled config finds its class again
    base = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if isinstance(base, type) and issubclass(base, PreTrainedConfig):
        return config_class(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
