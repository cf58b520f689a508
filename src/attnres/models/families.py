"""Which decoder families can be decomposed into sublayers, and how.

A family is described by names only: where its layers keep norms and sublayers, and which of a layer's arguments its
attention must not see. Everything else (masks, positions, caches, experts) stays Transformers'. That the description
is right is not believed but proved, at every conversion (see `attnres.models.proof`). A decoder that is not in the
table is looked at while it runs (see `attnres.models.discovery`), and then has to pass the same proof.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from torch import nn

from attnres.errors import ConfigError, UnsupportedModelError

Arguments = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SublayerParts:
    """A sublayer by the names of its parts: ``dropout(output_norm(module(norm(h))))``."""

    module: str
    """Attribute of the attention, or of the MLP or MoE."""
    norm: str | None = None
    """Attribute of the norm before it; None where it takes what it reads as it is (OLMo-2)."""
    output_norm: str | None = None
    """Attribute of the norm on its output (OLMo-2, Gemma-2), if there is one."""
    dropout: str | None = None
    """Attribute of the dropout on its output (Phi-3), if there is one."""

    @property
    def names(self) -> set[str]:
        """All attributes of the layer that belong to the sublayer."""
        return {name for name in (self.module, self.norm, self.output_norm, self.dropout) if name is not None}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a decoder layer splits into an attention and an MLP sublayer."""

    name: str
    """Name of the family, for messages."""
    layer_class: str
    """Class name of its decoder layer in Transformers."""
    attention: SublayerParts = SublayerParts(module="self_attn", norm="input_layernorm")
    """The attention sublayer."""
    mlp: SublayerParts = SublayerParts(module="mlp", norm="post_attention_layernorm")
    """The MLP sublayer."""
    parallel: bool | str = False
    """Whether attention and MLP read the same input and are written together, as one sublayer; or the attribute of the
    layer that says so (GPT-NeoX)."""
    drops: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By class name of an attention, arguments of the layer that it must not be given."""
    layers: str = "layers"
    """Attribute of the model that holds its decoder layers."""
    norm: str = "norm"
    """Attribute of the model that holds its final norm."""

    def is_parallel(self, layer: nn.Module) -> bool:
        """Whether a layer's attention and MLP are one sublayer."""
        return getattr(layer, self.parallel) if isinstance(self.parallel, str) else self.parallel

    def sublayers(self, layer: nn.Module) -> int:
        """How many sublayers a layer has: places where it reads and writes."""
        return 1 if self.is_parallel(layer) else 2

    def attention_arguments(self, attention: nn.Module, arguments: Arguments) -> Arguments:
        """From the layer's keyword arguments, those its attention takes."""
        dropped = self.drops.get(type(attention).__name__)
        return {k: v for k, v in arguments.items() if k not in dropped} if dropped else arguments

    def to_dict(self) -> dict[str, Any]:
        """The description as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            ConfigError: It does not describe a family.
        """
        try:
            parts = {name: SublayerParts(**data[name]) for name in ("attention", "mlp")}
            drops = {name: tuple(arguments) for name, arguments in data["drops"].items()}
            family = cls(**{**data, **parts, "drops": drops})
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"attnres_family is {data!r}; allowed is the description of a family ({error})"
            ) from error
        if not family._has_names():
            raise ConfigError(f"attnres_family is {data!r}; allowed is the description of a family (names are strings)")
        return family

    def _has_names(self) -> bool:
        names = [self.name, self.layer_class, self.layers, self.norm, self.attention.module, self.mlp.module]
        names += self.attention.names | self.mlp.names
        names += [name for kind, dropped in self.drops.items() for name in (kind, *dropped)]
        return all(isinstance(name, str) for name in names) and isinstance(self.parallel, bool | str)


def plain_norms(layers: nn.ModuleList, family: Family) -> list[nn.Module]:
    """The norm before each sublayer, in order; none at all where some sublayer is not just a norm and a module.

    A strategy that moves the norms, such as PostNorm, can do so only with these.
    """
    parts = (family.attention, family.mlp)
    if any(family.is_parallel(layer) for layer in layers) or any(p.norm is None or p.output_norm for p in parts):
        return []
    return [getattr(layer, part.norm) for layer in layers for part in parts if part.norm is not None]


def _sandwich(name: str, layer_class: str) -> Family:
    """A family whose sublayers have a norm on either side (Gemma-2 and later)."""
    return Family(
        name=name,
        layer_class=layer_class,
        attention=SublayerParts(module="self_attn", norm="input_layernorm", output_norm="post_attention_layernorm"),
        mlp=SublayerParts(module="mlp", norm="pre_feedforward_layernorm", output_norm="post_feedforward_layernorm"),
    )


FAMILIES: dict[str, Family] = {
    family.layer_class: family
    for family in (
        Family(name="Llama", layer_class="LlamaDecoderLayer"),
        Family(name="Mistral", layer_class="MistralDecoderLayer"),
        Family(name="Qwen2", layer_class="Qwen2DecoderLayer"),
        Family(name="Qwen3", layer_class="Qwen3DecoderLayer"),
        Family(name="Qwen3-MoE", layer_class="Qwen3MoeDecoderLayer"),
        Family(
            name="Phi-3",
            layer_class="Phi3DecoderLayer",
            attention=SublayerParts(module="self_attn", norm="input_layernorm", dropout="resid_attn_dropout"),
            mlp=SublayerParts(module="mlp", norm="post_attention_layernorm", dropout="resid_mlp_dropout"),
        ),
        Family(name="SmolLM3", layer_class="SmolLM3DecoderLayer"),
        Family(
            name="OLMo-2",
            layer_class="Olmo2DecoderLayer",
            attention=SublayerParts(module="self_attn", output_norm="post_attention_layernorm"),
            mlp=SublayerParts(module="mlp", output_norm="post_feedforward_layernorm"),
        ),
        _sandwich("Gemma-2", "Gemma2DecoderLayer"),
        _sandwich("Gemma-3", "Gemma3DecoderLayer"),
        Family(
            name="GPT-NeoX",
            layer_class="GPTNeoXLayer",
            attention=SublayerParts(module="attention", norm="input_layernorm", dropout="post_attention_dropout"),
            mlp=SublayerParts(module="mlp", norm="post_attention_layernorm", dropout="post_mlp_dropout"),
            parallel="use_parallel_residual",
            norm="final_layer_norm",
        ),
        Family(
            name="GPT-2",
            layer_class="GPT2Block",
            attention=SublayerParts(module="attn", norm="ln_1"),
            mlp=SublayerParts(module="mlp", norm="ln_2"),
            layers="h",
            norm="ln_f",
        ),
        Family(name="DeepSeek-V3", layer_class="DeepseekV3DecoderLayer"),
        Family(
            name="Kimi Linear",
            layer_class="KimiLinearDecoderLayer",
            # Kimi Delta Attention hands unknown arguments on to its kernels, so it must not see these
            drops={"KimiLinearDeltaAttention": ("position_ids", "use_cache")},
        ),
    )
}
"""Families that are known by the class name of their decoder layer."""


def known_family(base: Any) -> Family | None:
    """The family of a decoder, if it is in the table: by the class of its layers, where that family keeps them."""
    for family in FAMILIES.values():
        layers = getattr(base, family.layers, None)
        classes = {type(layer).__name__ for layer in layers} if isinstance(layers, nn.ModuleList) else set()
        if classes == {family.layer_class} and hasattr(base, family.norm):
            return family
    return None


def check_children(layers: nn.ModuleList, family: Family) -> None:
    """Refuse layers with parts that the family does not describe, which would not be run or not be saved.

    Raises:
        UnsupportedModelError: There is such a part, as with GPT-2's cross attention, or a tensor of the layer's own.
    """
    known = family.attention.names | family.mlp.names
    for index, layer in enumerate(layers):
        own = [*layer._parameters, *layer._buffers]
        if own:
            raise UnsupportedModelError(
                f"layer {index} ({type(layer).__name__}) has tensors of its own besides its parts ({', '.join(own)}), "
                "which conversion would lose"
            )
        children = {name for name, _ in layer.named_children()}
        if children != known:
            extra, lacking = sorted(children - known), sorted(known - children)
            seen = [f"has {', '.join(extra)} besides"] * bool(extra) + [f"lacks {', '.join(lacking)} of"] * bool(
                lacking
            )
            raise UnsupportedModelError(
                f"layer {index} ({type(layer).__name__}) {' and '.join(seen)} the parts of {family.name} "
                f"({', '.join(sorted(known))})"
            )
