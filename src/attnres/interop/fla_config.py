"""Configs of flash-linear-attention's transformer, and of the Transformers family that computes the same layers."""

from collections.abc import Mapping
from typing import Any

from attnres.errors import CheckpointError
from attnres.interop.folder import CheckpointFolder, raise_problems
from attnres.interop.own import Own, whole_number

MODEL_TYPE = "transformer"
QUERY_NORM_EPS = 1e-5
"""Its norms of queries and keys have this eps, whatever ``norm_eps`` is; those of Qwen3 have the model's."""
DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_heads": 32,
    "num_kv_heads": None,
    "qkv_bias": False,
    "qk_norm": False,
    "window_size": None,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "hidden_act": "swish",
    "initializer_range": 0.02,
    "norm_eps": 1e-6,
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
"""What a field is when a config does not have it."""
SAME = ("max_position_embeddings", "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id")
"""Fields that mean the same in both and touch no value here."""


def to_base(config: Mapping[str, Any], folder: CheckpointFolder) -> tuple[str, dict[str, Any]]:
    """The ``model_type`` and the fields of the family that computes the same layers.

    Raises:
        CheckpointError: There is none, or a size is not possible.
    """
    fla = {**DEFAULTS, **config}
    sizes = {name: whole_number(fla, name, folder) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    heads = whole_number(fla, "num_heads", folder)
    kv_heads = heads if fla["num_kv_heads"] is None else whole_number(fla, "num_kv_heads", folder)
    if sizes["hidden_size"] % heads or heads % kv_heads:
        raise CheckpointError(
            f"{folder.path}: hidden_size is {sizes['hidden_size']}, num_heads {heads} and num_kv_heads {kv_heads}; "
            "allowed are sizes that divide"
        )
    family = _family(fla, folder)
    fields = {
        **sizes,
        "intermediate_size": _intermediate_size(fla, folder),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": fla["norm_eps"],
        "rope_parameters": {"rope_theta": float(fla["rope_theta"]), "rope_type": "default"},
        "attention_dropout": 0.0,
        "tie_word_embeddings": fla["tie_word_embeddings"],
        **{name: fla[name] for name in SAME},
        **_family_fields(family, fla, sizes["hidden_size"] // heads),
    }
    dtype = fla.get("dtype", fla.get("torch_dtype"))
    return family, fields if dtype is None else {**fields, "dtype": dtype}


def fla_fields(base: Any, own: Own) -> dict[str, Any]:
    """The inverse of `to_base`, from a config of Transformers.

    Raises:
        CheckpointError: The base computes something that flash-linear-attention's transformer does not.
    """
    path = own.folder.path
    rope = base.rope_parameters or {}
    layer_types = getattr(base, "layer_types", None) or []
    qk_norm = own.base_model_type == "qwen3"
    told = {
        "hidden_act": base.hidden_act not in ("silu", "swish"),
        "attention_bias": getattr(base, "attention_bias", False),
        "mlp_bias": getattr(base, "mlp_bias", False),
        "attention_dropout": base.attention_dropout,
        "rope_parameters": rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1) != 1,
        "layer_types": any(kind != "full_attention" for kind in layer_types) and own.base_model_type != "mistral",
        "head_dim": _head_dim(base) * base.num_attention_heads != base.hidden_size,
        "rms_norm_eps": qk_norm and base.rms_norm_eps != QUERY_NORM_EPS,
    }
    these = [f"{name}={getattr(base, name, None)!r}" for name, wrong in told.items() if wrong]
    raise_problems(f"{path} has settings that flash-linear-attention's transformer does not have", {"these": these})
    window = base.sliding_window if own.base_model_type == "mistral" else None
    dtype = own.fields.get("dtype")
    return {
        **DEFAULTS,
        **{name: getattr(base, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size", *SAME)},
        "num_heads": base.num_attention_heads,
        "num_kv_heads": base.num_key_value_heads,
        "qkv_bias": own.base_model_type == "qwen2",
        "qk_norm": qk_norm,
        "window_size": window,
        "rope_theta": float(rope["rope_theta"]),
        "hidden_ratio": None,
        "intermediate_size": base.intermediate_size,
        "norm_eps": base.rms_norm_eps,
        "tie_word_embeddings": bool(base.tie_word_embeddings),
        **({} if dtype is None else {"dtype": dtype}),
    }


def _head_dim(base: Any) -> int:
    return getattr(base, "head_dim", None) or base.hidden_size // base.num_attention_heads


def _family(fla: Mapping[str, Any], folder: CheckpointFolder) -> str:
    """The family, by what the attention has besides projections; refuses what none has."""
    if fla["window_size"] is not None:
        whole_number(fla, "window_size", folder)
    for name in ("qkv_bias", "qk_norm", "tie_word_embeddings"):
        if not isinstance(fla[name], bool):
            raise CheckpointError(f"{folder.path}: {name} is {fla[name]!r}; allowed is true or false")
    wrong = [
        f"{name}={fla[name]!r} ({why})"
        for name, is_wrong, why in (
            ("hidden_act", fla["hidden_act"] != "swish", "Transformers' families have 'swish'"),
            ("rope_theta", not isinstance(fla["rope_theta"], int | float), "they all rotate queries and keys"),
            (
                "norm_eps",
                fla["qk_norm"] and fla["norm_eps"] != QUERY_NORM_EPS,
                f"with qk_norm, Qwen3 has one eps for all norms, and that of queries and keys here is {QUERY_NORM_EPS}",
            ),
        )
        if is_wrong
    ]
    extras = [name for name in ("qkv_bias", "qk_norm", "window_size") if fla[name] not in (None, False)]
    if len(extras) > 1:
        together = " and ".join(f"{name}={fla[name]!r}" for name in extras)
        wrong.append(f"{together} (no family of Transformers has them together)")
    raise_problems(f"{folder.path} has settings without a counterpart in Transformers", {"these": wrong})
    return {"qkv_bias": "qwen2", "qk_norm": "qwen3", "window_size": "mistral"}[extras[0]] if extras else "llama"


def _family_fields(family: str, fla: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    if family == "llama":
        return {"head_dim": head_dim, "attention_bias": False, "mlp_bias": False}
    if family == "mistral":
        return {"head_dim": head_dim, "sliding_window": fla["window_size"]}
    fields: dict[str, Any] = {"use_sliding_window": False, "sliding_window": None}
    fields["layer_types"] = ["full_attention"] * fla["num_hidden_layers"]
    return fields if family == "qwen2" else {**fields, "head_dim": head_dim, "attention_bias": False}


def _intermediate_size(fla: Mapping[str, Any], folder: CheckpointFolder) -> int:
    """As given, or two thirds of ``hidden_ratio`` times the width, rounded up to a multiple of 256."""
    if fla["intermediate_size"] is not None:
        return whole_number(fla, "intermediate_size", folder)
    ratio = 4 if fla["hidden_ratio"] is None else fla["hidden_ratio"]
    if not isinstance(ratio, int | float) or ratio <= 0:
        raise CheckpointError(f"{folder.path}: hidden_ratio is {ratio!r}; allowed is a number above 0")
    return 256 * -(-int(fla["hidden_size"] * ratio * 2 / 3) // 256)
