"""Give a Hugging Face decoder a residual strategy, a trained one by conversion, a new one from its config; and back."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from attnres.errors import ConfigError, UnsupportedModelError
from attnres.models.classes import AttnResMixin, adopt, release
from attnres.models.config import AttnResConfigMixin, config_class, describe_strategy, plain_config
from attnres.models.discovery import discover
from attnres.models.families import FAMILIES, Family, known_family
from attnres.models.gain import scale_projections
from attnres.models.install import make_residual, put_in, take_out
from attnres.models.proof import prove, prove_whole
from attnres.models.scale import check_scale
from attnres.residual import BlockAttnRes, FullAttnRes, PreNorm, Strategy


def build(config: PreTrainedConfig, strategy: Strategy, *, dtype: torch.dtype | None = None) -> Any:
    """Make a new causal language model of a Hugging Face config with a residual strategy.

    The weights are drawn as the family draws them, so one seed gives the same base weights under every strategy. A read
    scale left open becomes ``"mean"``, the paper's form.

    Args:
        config: Config of a supported family; it is copied.
        strategy: The residual strategy.
        dtype: Of the parameters; by default the config's own, else torch's default.

    Raises:
        ConfigError: The strategy does not fit the depth, or the config names another one.
        UnsupportedModelError: The family is unknown, or its decomposition is not exact.

    Examples:
        >>> from transformers import LlamaConfig
        >>> from attnres.residual import BlockAttnRes
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
        >>> build(config, BlockAttnRes(sublayers_per_block=2)).num_parameters()
        25056
    """
    _check_strategy(strategy)
    settled = strategy.with_read_scale("mean")
    saved = getattr(config, "attnres", None)
    if saved is not None and saved != describe_strategy(settled):
        raise ConfigError(f"the config says attnres={saved}, but {describe_strategy(settled)} was asked for")
    keywords = {} if dtype is None else {"dtype": dtype}
    plain = plain_config(config) if isinstance(config, AttnResConfigMixin) else copy.deepcopy(config)
    model = AutoModelForCausalLM.from_config(plain, **keywords)
    converted = convert(model, settled, allow_change=True)
    scale_projections(converted, settled.weight_gain(converted.base_model.residual.num_sublayers))
    return converted


def convert(model: Any, strategy: Strategy, *, allow_change: bool = False) -> Any:
    """Give a Hugging Face decoder a residual strategy, in place, sharing all its weights.

    Names of the base parameters do not change. For the strategies that start as PreNorm does, Full and Block AttnRes
    among them, the converted model is the same function as before (to rounding): with zero pseudo-queries (as they
    start) and the default read scale of conversion, ``"sum"``, every hidden value is the residual sum. Others, such as
    PostNorm, make another function of the same weights; docs/strategies.md says which. Before anything is replaced,
    one layer of each kind is run against its decomposition. A decoder of an unknown family is described by watching it
    run, and then has to pass the same check.

    Args:
        model: A `PreTrainedModel`, with or without its language-model head.
        strategy: The residual strategy; a read scale left open becomes ``"sum"``.
        allow_change: Convert even where reads are means (``read_scale="mean"``) and something reads them without a
            norm, so that the model's function changes.

    Returns:
        The same model object, now of a class derived from its own, with `model.base_model.residual`.

    Raises:
        ConfigError: The strategy does not fit the depth or the width.
        UnsupportedModelError: The model is not a decoder, has a strategy already, its decomposition is not exact, its
            layers have hooks, which would be lost, or the read scale would change it.
    """
    _check_strategy(strategy)
    base = _base_model(model)
    family = known_family(base) or discover(base)
    _check_no_hooks(getattr(base, family.layers))
    residual = make_residual(base, family, strategy.with_read_scale("sum"))
    prove(base, family)
    if family.layer_class not in FAMILIES:
        prove_whole(base, family)
    if not allow_change:
        check_scale(base, family, residual.strategy)
    put_in(base, family, residual)
    described = None if family.layer_class in FAMILIES else family
    _own_config(model, residual.strategy, described)
    for part in {id(part): part for part in (model, base)}.values():
        adopt(part)
    return model


def unconvert(model: Any, *, allow_change: bool = False) -> Any:
    """Take the residual strategy out of a converted model again, in place: its own layers, and all its weights.

    With zero pseudo-queries and ``read_scale="sum"`` the plain model is the same function (to rounding). What the
    residual path has learned is lost; `attnres unconvert` says by how much the model changes.

    Args:
        model: A model that `convert` or `build` returned, or a loaded one.
        allow_change: Take it out even where the plain model is another function.

    Returns:
        The same model object, now of its family's own class.

    Raises:
        UnsupportedModelError: The model has no strategy, or one that changes the sublayers themselves, or the plain
            model may be another function and that was not allowed.
    """
    base = converted_base(model)
    if not (allow_change or _is_plain_sum(base.residual)):
        raise UnsupportedModelError(
            f"the plain model is another function: {base.residual.strategy.label} has queries that are not zero, or "
            "reads that are not sums; allowed with allow_change=True"
        )
    take_out(base)
    _replace_config(model, plain_config(model.config))
    for part in {id(part): part for part in (model, base)}.values():
        release(part)
    return model


def _is_plain_sum(residual: Any) -> bool:
    """Whether every read is the residual sum, whatever the weights of the model."""
    strategy = residual.strategy
    if isinstance(strategy, PreNorm):
        return True
    if not isinstance(strategy, FullAttnRes | BlockAttnRes) or strategy.read_scale != "sum":
        return False
    return not any(bool(site.pseudo_query.any()) for site in residual.sites)


def converted_base(model: Any) -> Any:
    """The model without head that holds the residual path of a converted model.

    Raises:
        UnsupportedModelError: The model is not a converted one.
    """
    if not isinstance(model, AttnResMixin):
        raise UnsupportedModelError(f"{type(model).__name__} has no residual strategy; allowed is a converted model")
    base: Any = model.base_model  # pyright: ignore[reportAttributeAccessIssue]
    return base


def _check_strategy(strategy: Any) -> None:
    if not isinstance(strategy, Strategy):
        raise ConfigError(f"strategy is {strategy!r}; allowed is one of attnres.residual, such as FullAttnRes()")


def _base_model(model: Any) -> Any:
    base: Any = getattr(model, "base_model", None)
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"model is a {type(model).__name__}; allowed is a transformers.PreTrainedModel")
    if isinstance(model, AttnResMixin):
        seen = base.residual.strategy.label
        raise UnsupportedModelError(f"{type(model).__name__} has a residual strategy already ({seen})")
    if getattr(base.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{type(base).__name__} is an encoder and a decoder; allowed is a decoder alone")
    return base


def _check_no_hooks(layers: nn.ModuleList) -> None:
    for index, layer in enumerate(layers):
        if "forward" in vars(layer) or any(map(_is_foreign, _hooks(layer))):
            raise UnsupportedModelError(
                f"layer {index} ({type(layer).__name__}) has hooks or a forward of its own, which conversion would "
                "lose; allowed: a model without them, so convert first and add hooks afterwards"
            )


def _hooks(layer: nn.Module) -> list[Any]:
    return [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]


def _is_foreign(hook: Any) -> bool:
    """Whether a hook is not Transformers' own for ``output_hidden_states``, which the taps take over."""
    return getattr(hook, "__name__", "") != "output_capturing_hook"


def _own_config(model: PreTrainedModel, strategy: Strategy, described: Family | None) -> None:
    """Write the strategy into a config of the model's own; other models may share the one it came with."""
    new: Any = copy.deepcopy(model.config)
    new.__class__ = config_class(type(new))
    new.attnres = describe_strategy(strategy)
    if described is not None:
        new.attnres_family = described.to_dict()
    _replace_config(model, new)


def _replace_config(model: PreTrainedModel, new: Any) -> None:
    old = model.config
    for module in model.modules():
        if getattr(module, "config", None) is old:
            vars(module)["config"] = new
