"""Which decoder families can be decomposed into sublayers, and how.

A family is described by names only: where its layers keep norms and sublayers, and which of a layer's arguments its
attention takes. Everything else (masks, positions, caches, experts) stays Transformers'. That the description is right
is not believed but proved, at every conversion (see `attnres.models.proof`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from attnres.errors import UnsupportedModelError

Arguments = Mapping[str, Any]


def _pass_all(layer: nn.Module, arguments: Arguments) -> Arguments:
    del layer
    return arguments


def _kimi_linear_arguments(layer: nn.Module, arguments: Arguments) -> Arguments:
    """Kimi Delta Attention hands unknown arguments on to its kernels, so it must not see positions and cache flags."""
    if layer.block_type != "linear_attention":
        return arguments
    return {name: value for name, value in arguments.items() if name not in ("position_ids", "use_cache")}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a pre-norm decoder layer splits into ``norm -> attention`` and ``norm -> MLP``."""

    name: str
    """Name of the family, for messages."""
    layer_class: str
    """Class name of its decoder layer in Transformers."""
    attention: str = "self_attn"
    """Attribute of the attention sublayer."""
    attention_norm: str = "input_layernorm"
    """Attribute of the norm before attention."""
    mlp: str = "mlp"
    """Attribute of the MLP or MoE sublayer."""
    mlp_norm: str = "post_attention_layernorm"
    """Attribute of the norm before the MLP."""
    attention_arguments: Callable[[nn.Module, Arguments], Arguments] = _pass_all
    """From the layer's keyword arguments, those its attention takes."""


def sublayer_norms(layers: nn.ModuleList, family: Family) -> list[nn.Module]:
    """The norm of each sublayer, in order."""
    return [getattr(layer, name) for layer in layers for name in (family.attention_norm, family.mlp_norm)]


FAMILIES: dict[str, Family] = {
    family.layer_class: family
    for family in (
        Family(name="Llama", layer_class="LlamaDecoderLayer"),
        Family(name="Qwen3", layer_class="Qwen3DecoderLayer"),
        Family(
            name="Kimi Linear",
            layer_class="KimiLinearDecoderLayer",
            attention_arguments=_kimi_linear_arguments,
        ),
    )
}
"""Supported families by the class name of their decoder layer."""


def family_of(layers: nn.ModuleList) -> Family:
    """The family of a model's decoder layers.

    Raises:
        UnsupportedModelError: The layers are of an unknown class, or of several.
    """
    seen = sorted({type(layer).__name__ for layer in layers})
    if len(seen) == 1 and seen[0] in FAMILIES:
        return FAMILIES[seen[0]]
    allowed = ", ".join(f"{family.name} ({family.layer_class})" for family in FAMILIES.values())
    raise UnsupportedModelError(f"decoder layers are {', '.join(seen) or 'missing'}; supported are {allowed}")
