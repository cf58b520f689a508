"""Give a Hugging Face decoder a residual strategy: a trained one by conversion, a new one from its config."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from attnres.errors import ConfigError, UnsupportedModelError
from attnres.models.attention import adapt_attention, check_attention
from attnres.models.classes import AttnResMixin, adopt
from attnres.models.families import family_of, sublayer_norms
from attnres.models.gain import scale_projections
from attnres.models.layer import ResidualDecoderLayer, read_before
from attnres.models.proof import prove
from attnres.residual import Residual, Strategy


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
    settled = strategy.with_read_scale("mean")
    saved = getattr(config, "attnres", None)
    if saved is not None and saved != describe_strategy(settled):
        raise ConfigError(f"the config says attnres={saved}, but {describe_strategy(settled)} was asked for")
    keywords = {} if dtype is None else {"dtype": dtype}
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **keywords)
    converted = convert(model, settled)
    scale_projections(converted, settled.weight_gain(converted.base_model.residual.num_sublayers))
    return converted


def convert(model: Any, strategy: Strategy) -> Any:
    """Give a Hugging Face decoder a residual strategy, in place, sharing all its weights.

    Names of the base parameters do not change. For the strategies that start as PreNorm does, Full and Block AttnRes
    among them, the converted model is the same function as before (to rounding): with zero pseudo-queries (as they
    start) and the default read scale of conversion, ``"sum"``, every hidden value is the residual sum. Others, such as
    PostNorm, make another function of the same weights; docs/strategies.md says which. Before anything is replaced,
    one layer of each kind is run against its decomposition.

    Args:
        model: A `PreTrainedModel` of a supported family, with or without its language-model head.
        strategy: The residual strategy; a read scale left open becomes ``"sum"``.

    Returns:
        The same model object, now of a class derived from its own, with `model.base_model.residual`.

    Raises:
        ConfigError: The strategy does not fit the depth or the width.
        UnsupportedModelError: The model is not a supported decoder, has a strategy already, its decomposition is not
            exact, or its layers have hooks, which would be lost.
    """
    base = _base_model(model)
    family = family_of(base.layers)
    embedding, norm = base.get_input_embeddings().weight, base.norm
    residual = Residual(
        strategy.with_read_scale("sum"),
        2 * len(base.layers),
        embedding.shape[-1],
        eps=norm.variance_epsilon,
        norms=sublayer_norms(base.layers, family),
        device=norm.weight.device,
        dtype=norm.weight.dtype,
    )
    prove(base, family)
    for index, layer in enumerate(base.layers):
        check_attention(residual.site(2 * index), layer, family)
    base.layers = nn.ModuleList(
        ResidualDecoderLayer(layer, family, residual, index) for index, layer in enumerate(base.layers)
    )
    base.residual = residual
    for index, layer in enumerate(base.layers):
        adapt_attention(residual.site(2 * index), layer, family)
    read_before(norm, residual)
    _own_config(model, residual.strategy, num_hidden_states=len(base.layers) + 1)
    for part in {id(part): part for part in (model, base)}.values():
        adopt(part)
    return model


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


def _base_model(model: Any) -> Any:
    base: Any = getattr(model, "base_model", None)
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"model is a {type(model).__name__}; allowed is a transformers.PreTrainedModel")
    if isinstance(model, AttnResMixin):
        seen = base.residual.strategy.label
        raise UnsupportedModelError(f"{type(model).__name__} has a residual strategy already ({seen})")
    missing = [name for name in ("layers", "norm") if not hasattr(base, name)]
    if missing:
        raise UnsupportedModelError(f"{type(base).__name__} has no {' and no '.join(missing)}; not a supported decoder")
    for index, layer in enumerate(base.layers):
        if "forward" in vars(layer) or any(map(_is_foreign, _hooks(layer))):
            raise UnsupportedModelError(
                f"layer {index} ({type(layer).__name__}) has hooks or a forward of its own, which conversion would "
                "lose; allowed: a model without them, so convert first and add hooks afterwards"
            )
    return base


def _hooks(layer: nn.Module) -> list[Any]:
    return [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]


def _is_foreign(hook: Any) -> bool:
    """Whether a hook is not Transformers' own for ``output_hidden_states``, which the taps take over."""
    return getattr(hook, "__name__", "") != "output_capturing_hook"


def _own_config(model: PreTrainedModel, strategy: Strategy, *, num_hidden_states: int) -> None:
    """Write the strategy into a config of the model's own; other models may share the one it came with."""
    old, new = model.config, copy.deepcopy(model.config)
    new.attnres = describe_strategy(strategy)
    new.num_hidden_states = num_hidden_states
    for module in model.modules():
        if getattr(module, "config", None) is old:
            vars(module)["config"] = new
