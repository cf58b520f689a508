"""The config of a folder of ours: the base family's fields, the residual strategy, and where it was imported from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from attnres.errors import CheckpointError, ConfigError
from attnres.interop.folder import CheckpointFolder
from attnres.models.config import BASE_MODEL_TYPE, MODEL_TYPE, PREFIX, describe_strategy, parse_strategy
from attnres.residual import BlockAttnRes, FullAttnRes, Strategy

STRATEGY, FAMILY, ORIGIN = "attnres", "attnres_family", "imported_from"
OWN_FIELDS = frozenset({STRATEGY, FAMILY, ORIGIN, BASE_MODEL_TYPE, "model_type", "architectures", "num_hidden_states"})
"""Fields of our config that are not the base family's."""
CODE = "auto_map"
"""Field that names code in the folder to run; it is never taken over."""


@final
@dataclass(frozen=True, kw_only=True)
class Own:
    """A checkpoint folder of ours."""

    folder: CheckpointFolder
    """Config and tensors as they are."""
    strategy: Strategy
    """The residual strategy."""
    base_model_type: str
    """``model_type`` of the base family."""
    fields: Mapping[str, Any]
    """The base family's fields."""
    origin: Mapping[str, Any]
    """What an import noted; empty for a model that was not imported."""


def own_config(
    fields: Mapping[str, Any], *, base_model_type: str, base_class: str, strategy: Strategy, origin: Mapping[str, Any]
) -> dict[str, Any]:
    """The ``config.json`` of a folder of ours.

    Args:
        fields: Fields of the base family's config.
        base_model_type: Its ``model_type``.
        base_class: Name of its class with a language-model head.
        strategy: The residual strategy.
        origin: What an export to the same format needs to give back what came in; its ``kind`` names the format.
    """
    kept = {name: value for name, value in fields.items() if name not in {*OWN_FIELDS, CODE}}
    return {
        "architectures": [PREFIX + base_class],
        "model_type": MODEL_TYPE,
        BASE_MODEL_TYPE: base_model_type,
        **kept,
        STRATEGY: describe_strategy(strategy),
        ORIGIN: dict(origin),
    }


def read_own(folder: CheckpointFolder) -> Own:
    """A folder as one of ours.

    Raises:
        CheckpointError: It is not, or its strategy is unknown.
    """
    return parse_own(folder, folder.config)


def parse_own(folder: CheckpointFolder, config: Mapping[str, Any]) -> Own:
    """A config of ours; that of the folder, or one that is to be made of it.

    Raises:
        CheckpointError: It is not one of ours, or its strategy is unknown.
    """
    if config.get("model_type") != MODEL_TYPE or not isinstance(config.get(BASE_MODEL_TYPE), str):
        raise CheckpointError(
            f"{folder.path}: model_type is {config.get('model_type')!r}; allowed is a folder that attnres wrote "
            f"({MODEL_TYPE!r}, with {BASE_MODEL_TYPE})"
        )
    try:
        strategy = parse_strategy(config.get(STRATEGY))
    except ConfigError as error:
        raise CheckpointError(f"{folder.path}: {error}") from error
    origin = config.get(ORIGIN)
    return Own(
        folder=folder,
        strategy=strategy,
        base_model_type=config[BASE_MODEL_TYPE],
        fields={name: value for name, value in config.items() if name not in OWN_FIELDS},
        origin=origin if isinstance(origin, dict) else {},
    )


def base_config(own: Own) -> PreTrainedConfig:
    """The config of the base family, as Transformers understands it, defaults filled in.

    Raises:
        CheckpointError: Transformers does not know the family, or refuses a field.
    """
    try:
        return AutoConfig.for_model(own.base_model_type, **own.fields)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{own.folder.path}: not a config of {own.base_model_type}; {reason}") from error


def whole_number(config: Mapping[str, Any], name: str, folder: CheckpointFolder) -> int:
    """A field that has to be a whole number of 1 or more.

    Raises:
        CheckpointError: It is not.
    """
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{folder.path}: {name} is {value!r}; allowed is a whole number of 1 or more")
    return value


def block_length(own: Own, num_sublayers: int, *, kind: str) -> int:
    """The block size of Full or Block AttnRes in sublayers; 1 is Full.

    Raises:
        CheckpointError: The strategy is another one, its reads are sums, or its blocks are not all of one size.
    """
    strategy = own.strategy
    if not isinstance(strategy, FullAttnRes | BlockAttnRes):
        raise CheckpointError(f"{own.folder.path}: the strategy is {strategy.label}; {kind} has Full and Block AttnRes")
    if strategy.read_scale != "mean":
        raise CheckpointError(
            f'{own.folder.path}: read_scale is {strategy.read_scale!r}; allowed is "mean", as the reads of {kind} are'
        )
    ends = strategy.block_ends(num_sublayers)
    size = ends[0]
    if isinstance(strategy, BlockAttnRes) and strategy.sublayers_per_block is not None and len(ends) == 1:
        size = strategy.sublayers_per_block  # one block, which may be longer than the model
    if ends != tuple(min(start + size, num_sublayers) for start in range(0, num_sublayers, size)):
        raise CheckpointError(
            f"{own.folder.path}: blocks end after {list(ends)} sublayers; those of {kind} have one size"
        )
    return size


def block_strategy(sublayers_per_block: int) -> Strategy:
    """Block AttnRes whose reads are means, or Full AttnRes for blocks of one sublayer."""
    if sublayers_per_block == 1:
        return FullAttnRes(read_scale="mean")
    return BlockAttnRes(sublayers_per_block=sublayers_per_block, read_scale="mean")
