"""Kimi K3: a Kimi Linear decoder with Block AttnRes, each read stored as a projection to one number and a norm.

``attn_res_block_size`` counts decoder layers, so 12 are blocks of 24 sublayers. The names of the base model are those
of Transformers' Kimi Linear and pass through as they are; in a multimodal checkpoint all names of the language model
begin with ``language_model.``. The attention read of layer 0 has parameters that no forward pass uses; they are kept.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, final

from attnres.errors import CheckpointError
from attnres.interop.folder import CheckpointFolder, raise_problems
from attnres.interop.formats import Format, Translated
from attnres.interop.names import SITES, Entry, depth_entries, to_ours, to_theirs, unknown
from attnres.interop.own import CODE, Own, block_length, block_strategy, own_config, whole_number
from attnres.interop.stored import StoredTensor

BLOCK_SIZE, TEXT = "attn_res_block_size", "text_config"
WRAPPER = "language_model."
"""How names of the language model begin in a multimodal checkpoint."""
BASE, BASE_CLASS = "kimi_linear", "KimiLinearForCausalLM"
HEAD_FIELDS = ("architectures", "model_type")

ATTENTION = ".self_attn."
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_DEPTH = re.compile(r"(^|\.)(self_attention_res|mlp_res|output_attn_res)_(proj|norm)\.")

FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mla_use_nope": (True,),
    "moe_layer_freq": (1,),
    "moe_router_activation_func": ("sigmoid",),
    "num_nextn_predict_layers": (0, None),
    "rope_scaling": (None,),
    "topk_method": ("noaux_tc",),
}
"""Fields of which Transformers' Kimi Linear computes these values only."""
QUANTISED = "quantization_config"
FREE = frozenset(
    {"first_k_dense_replace", "linear_attn_config", "rope_theta", "use_grouped_topk", "torch_dtype", QUANTISED}
)
"""Fields that it reads although its config class does not declare them, or that change no value."""
LINEAR_FREE = frozenset({"kda_layers", "full_attn_layers", "num_heads", "head_dim", "short_conv_kernel_size"})
"""The same inside ``linear_attn_config``."""


@final
class KimiK3(Format):
    """Kimi K3's text model."""

    kind: ClassVar[str] = "kimi-k3"

    def recognizes(self, config: Mapping[str, Any]) -> bool:
        """By the block size, even if it is null."""
        text = config.get(TEXT)
        return BLOCK_SIZE in config or (isinstance(text, dict) and BLOCK_SIZE in text)

    def to_ours(self, folder: CheckpointFolder, *, text_only: bool) -> Translated:
        """Names and config of Kimi K3 as ours."""
        text, wrapper = _split(folder)
        _check_base(text, folder)
        layers, dim = (whole_number(text, name, folder) for name in ("num_hidden_layers", "hidden_size"))
        strategy = block_strategy(2 * _layers_per_block(text, folder))
        tensors, prefix = _language_model(folder, text_only=text_only)
        entries = _entries(layers, dim)
        depth, problems = to_ours(tensors, entries)
        known = {entry.theirs for entry in entries}
        problems["not in the model"] = [name for name in tensors if _is_foreign(name, layers) and name not in known]
        problems["missing"] = [*problems.get("missing", []), *_missing_parts(tensors, layers)]
        raise_problems(f"{folder.path} is not a Kimi K3 of {layers} layers and width {dim}", problems)
        base = [tensor for name, tensor in tensors.items() if name not in known]
        origin = {"kind": self.kind, "prefix": prefix, "text": _pick(text), "wrapper": wrapper}
        fields = {name: value for name, value in text.items() if name != BLOCK_SIZE}
        config = own_config(fields, base_model_type=BASE, base_class=BASE_CLASS, strategy=strategy, origin=origin)
        return Translated(config=config, tensors=[*base, *depth])

    def from_ours(self, own: Own) -> Translated:
        """The inverse; a model that was not imported gets the names without ``language_model.``."""
        path, tensors = own.folder.path, own.folder.tensors
        if own.base_model_type != BASE:
            raise CheckpointError(f"{path}: the base is {own.base_model_type!r}; that of {self.kind} is {BASE!r}")
        layers, dim = (whole_number(own.fields, name, own.folder) for name in ("num_hidden_layers", "hidden_size"))
        size = block_length(own, 2 * layers, kind=self.kind)
        if size % 2:
            raise CheckpointError(f"{path}: blocks of {size} sublayers; those of {self.kind} are whole layers of 2")
        origin = own.origin if own.origin.get("kind") == self.kind else {}
        entries = _entries(layers, dim)
        depth, problems = to_theirs(tensors, entries)
        known = {entry.ours for entry in entries}
        problems["not in the model"] = [n for n in unknown(tensors, known) if SITES in n or _is_foreign(n, layers)]
        problems["missing"] = [*problems.get("missing", []), *_missing_parts(tensors, layers)]
        raise_problems(f"{path} is not a model of {layers} layers and width {dim}", problems)
        base = [tensor for name, tensor in tensors.items() if name not in known]
        prefix = origin.get("prefix", "")
        named = [tensor.renamed(prefix + tensor.name, tensor.shape) for tensor in (*base, *depth)]
        return Translated(config=_config(own.fields, origin, layers_per_block=size // 2), tensors=named)


def _entries(layers: int, dim: int) -> list[Entry]:
    halves = ("self_attention_res", "mlp_res")
    stems = [f"model.layers.{layer}.{half}" for layer in range(layers) for half in halves]
    return depth_entries([*stems, "model.output_attn_res"], dim)


def _is_foreign(name: str, layers: int) -> bool:
    """Whether a name is that of a residual parameter, or of a layer that the config does not count."""
    layer = _LAYER.match(name)
    return _DEPTH.search(name) is not None or (layer is not None and int(layer[1]) >= layers)


def _missing_parts(tensors: Mapping[str, StoredTensor], layers: int) -> list[str]:
    """What the base has to have under every naming of its parts; enough to miss a shard or a layer."""
    names = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    for layer in range(layers):
        names += [f"model.layers.{layer}.{norm}_layernorm.weight" for norm in ("input", "post_attention")]
    missing = [name for name in names if name not in tensors]
    with_attention = {name.partition(ATTENTION)[0] for name in tensors if ATTENTION in name}
    lacking = [f"model.layers.{i}" for i in range(layers) if f"model.layers.{i}" not in with_attention]
    return [*missing, *(f"{layer}{ATTENTION}*" for layer in lacking)]


def _split(folder: CheckpointFolder) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The text model's fields, and the fields around them in a multimodal config."""
    config = {name: value for name, value in folder.config.items() if name != CODE}
    text = config.pop(TEXT, None)
    if not isinstance(text, dict):
        return config, None
    if QUANTISED in {*config, *text}:
        raise CheckpointError(
            f"{folder.path}: {QUANTISED} names modules of the multimodal model, which is not translated; allowed are "
            "weights that are not quantised, or a text model"
        )
    outer = config.get(BLOCK_SIZE, text.get(BLOCK_SIZE))
    if outer != text.get(BLOCK_SIZE):
        raise CheckpointError(
            f"{folder.path}: {BLOCK_SIZE} is {outer} and {TEXT}.{BLOCK_SIZE} is {text.get(BLOCK_SIZE)}; "
            f"allowed is one value, in {TEXT}"
        )
    return {name: value for name, value in text.items() if name != CODE}, config


def _pick(text: Mapping[str, Any]) -> dict[str, Any]:
    return {name: text[name] for name in HEAD_FIELDS if name in text}


def _layers_per_block(text: Mapping[str, Any], folder: CheckpointFolder) -> int:
    if text.get(BLOCK_SIZE) is None:
        raise CheckpointError(
            f"{folder.path}: {BLOCK_SIZE} is None, so the model has a plain residual; allowed is a whole number of "
            "decoder layers (attnres.convert gives a plain model attention residuals)"
        )
    return whole_number(text, BLOCK_SIZE, folder)


def _check_base(text: Mapping[str, Any], folder: CheckpointFolder) -> None:
    """Refuse a base that Transformers' Kimi Linear would load and compute as something else."""
    kind = text.get("model_type", BASE)
    if not str(kind).startswith("kimi"):
        raise CheckpointError(f"{folder.path}: model_type is {kind!r} with {BLOCK_SIZE}; allowed are Kimi models")
    known, inner = _known_fields(), text.get("linear_attn_config") or {}
    told = [
        f"{name}={value!r}"
        for name, value in text.items()
        if (name in FIXED and value not in FIXED[name])
        or (name not in known and name not in FIXED and value not in (None, False))
    ]
    told += [
        f"linear_attn_config.{k}={v!r}" for k, v in inner.items() if k not in LINEAR_FREE and v not in (None, False)
    ]
    raise_problems(
        f"{folder.path} has settings that Transformers' Kimi Linear, its base here, does not compute", {"these": told}
    )


@cache
def _known_fields() -> frozenset[str]:
    from transformers import KimiLinearConfig

    config = KimiLinearConfig()
    return FREE | {*vars(config), *config.to_dict(), *config.attribute_map, *config.attribute_map.values(), BLOCK_SIZE}


def _language_model(folder: CheckpointFolder, *, text_only: bool) -> tuple[dict[str, StoredTensor], str]:
    """The tensors of the language model, without the wrapper's prefix, and that prefix."""
    tensors = dict(folder.tensors)
    taken = [name for name in tensors if name.startswith(SITES)]
    raise_problems(f"{folder.path} has residual parameters under names of attnres", {"these": taken})
    if not any(name.startswith(WRAPPER) for name in tensors):
        return tensors, ""
    outside = [name for name in tensors if not name.startswith(WRAPPER)]
    raise_problems(
        f"{folder.path} has tensors with and without {WRAPPER}",
        {"without": [name for name in outside if name.startswith(("model.", "lm_head."))]},
    )
    if not text_only:
        raise_problems(
            f"{folder.path} has tensors outside of the language model; text_only (--text-only) leaves them out",
            {"these": outside},
        )
    inside = {name.removeprefix(WRAPPER): tensor for name, tensor in tensors.items() if name not in outside}
    return {name: tensor.renamed(name, tensor.shape) for name, tensor in inside.items()}, WRAPPER


def _config(fields: Mapping[str, Any], origin: Mapping[str, Any], *, layers_per_block: int) -> dict[str, Any]:
    head = origin.get("text", {"architectures": [BASE_CLASS], "model_type": BASE})
    text = {**head, **fields, BLOCK_SIZE: layers_per_block}
    wrapper = origin.get("wrapper")
    return text if wrapper is None else {**wrapper, TEXT: text}
