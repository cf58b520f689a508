"""flash-linear-attention's plain transformer: Full and Block AttnRes over Llama-like layers.

Twenty-nine of its families take ``attnres_block_size``, which counts sublayers and is 1 (Full) or even. The layers of
one of them, ``transformer``, are what Transformers computes too: as Llama, as Qwen2 with biases on queries, keys and
values, as Qwen3 with norms on queries and keys, as Mistral with a window. That one is read and written; every name and
every shape is checked, those of the base model too.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, final

from attnres.errors import CheckpointError
from attnres.interop.fla_config import MODEL_TYPE, fla_fields, to_base
from attnres.interop.folder import CheckpointFolder, raise_problems
from attnres.interop.formats import Format, Translated
from attnres.interop.names import Entry, depth_entries, to_ours, to_theirs, unknown
from attnres.interop.own import CODE, Own, base_config, block_length, block_strategy, own_config, whole_number
from attnres.interop.stored import StoredTensor, same_bytes

BLOCK_SIZE = "attnres_block_size"
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
"""Transformers' families that compute the same layers."""
HEAD, EMBEDDING = "lm_head.weight", "model.embeddings.weight"


@final
class FlashLinearAttention(Format):
    """The ``transformer`` family of flash-linear-attention."""

    kind: ClassVar[str] = "fla"

    def recognizes(self, config: Mapping[str, Any]) -> bool:
        """By the block size, even if it is null."""
        return BLOCK_SIZE in config

    def to_ours(self, folder: CheckpointFolder, *, text_only: bool) -> Translated:
        """Names and config of flash-linear-attention as ours."""
        del text_only  # there is nothing but text
        fla = {name: value for name, value in folder.config.items() if name != CODE}
        size = _sublayers_per_block(fla, folder)
        base_type, fields = to_base(fla, folder)
        entries = _entries(fields, base_type)
        tensors, problems = to_ours(folder.tensors, entries)
        _finish(folder, folder.tensors, [entry.theirs for entry in entries], problems, fields, EMBEDDING)
        config = own_config(
            fields,
            base_model_type=base_type,
            base_class=CLASSES[base_type],
            strategy=block_strategy(size),
            origin={"kind": self.kind, "config": fla},
        )
        return Translated(config=config, tensors=tensors)

    def from_ours(self, own: Own) -> Translated:
        """The inverse; a config that was imported and says the same is given back as it came."""
        folder = own.folder
        if own.base_model_type not in CLASSES:
            allowed = ", ".join(CLASSES)
            raise CheckpointError(f"{folder.path}: the base is {own.base_model_type!r}; {self.kind} has {allowed}")
        base = base_config(own)
        fla = fla_fields(base, own)
        size = block_length(own, 2 * fla["num_hidden_layers"], kind=self.kind)
        _check_block_size(size, folder)
        _, fields = to_base(fla, folder)
        entries = _entries(fields, own.base_model_type)
        tensors, problems = to_theirs(folder.tensors, entries)
        _finish(
            folder, folder.tensors, [entry.ours for entry in entries], problems, fields, "model.embed_tokens.weight"
        )
        return Translated(config=_config({**fla, BLOCK_SIZE: size}, own), tensors=tensors)


def _entries(fields: Mapping[str, Any], base_type: str) -> list[Entry]:
    """Every tensor of a model, from the base family's fields."""
    dim, inner, words = fields["hidden_size"], fields["intermediate_size"], fields["vocab_size"]
    head = dim // fields["num_attention_heads"]
    keys = head * fields["num_key_value_heads"]
    layers = fields["num_hidden_layers"]
    shapes = {
        f"attn.{name}_proj.weight": (rows, dim) for name, rows in (("q", dim), ("k", keys), ("v", keys), ("o", dim))
    }
    if base_type == "qwen2":
        shapes |= {f"attn.{name}_proj.bias": (rows,) for name, rows in (("q", dim), ("k", keys), ("v", keys))}
    if base_type == "qwen3":
        shapes |= {"attn.q_norm.weight": (head,), "attn.k_norm.weight": (head,)}
    shapes |= {"attn_norm.weight": (dim,), "mlp_norm.weight": (dim,), "mlp.down_proj.weight": (dim, inner)}
    shapes |= {"mlp.gate_proj.weight": (inner, dim), "mlp.up_proj.weight": (inner, dim)}
    entries = [
        _entry(f"model.layers.{layer}.{name}", f"model.layers.{layer}.{_our_name(name)}", shape)
        for layer in range(layers)
        for name, shape in shapes.items()
    ]
    entries.append(_entry(EMBEDDING, "model.embed_tokens.weight", (words, dim)))
    entries.append(_entry("model.norm.weight", "model.norm.weight", (dim,)))
    entries.append(_entry(HEAD, HEAD, (words, dim), optional=fields["tie_word_embeddings"]))
    stems = [f"model.layers.{layer}.{half}_res" for layer in range(layers) for half in ("attn", "mlp")]
    return [*entries, *depth_entries([*stems, "model.res"], dim)]


def _entry(theirs: str, ours: str, shape: tuple[int, ...], *, optional: bool = False) -> Entry:
    return Entry(theirs=theirs, ours=ours, their_shapes=(shape,), our_shape=shape, optional=optional)


def _our_name(name: str) -> str:
    """A name inside a layer, as Transformers has it."""
    norms = {"attn_norm.weight": "input_layernorm.weight", "mlp_norm.weight": "post_attention_layernorm.weight"}
    return norms.get(name) or (f"self_{name}" if name.startswith("attn.") else name)


def _sublayers_per_block(config: Mapping[str, Any], folder: CheckpointFolder) -> int:
    kind = config.get("model_type")
    if kind != MODEL_TYPE:
        raise CheckpointError(
            f"{folder.path}: model_type is {kind!r}; allowed is {MODEL_TYPE!r}, the one family of "
            "flash-linear-attention whose layers Transformers computes too"
        )
    if config.get(BLOCK_SIZE) is None:
        raise CheckpointError(
            f"{folder.path}: {BLOCK_SIZE} is None, so the model has a plain residual; allowed are 1 and even numbers "
            "of sublayers"
        )
    size = whole_number(config, BLOCK_SIZE, folder)
    _check_block_size(size, folder)
    return size


def _check_block_size(size: int, folder: CheckpointFolder) -> None:
    if size != 1 and size % 2:
        raise CheckpointError(
            f"{folder.path}: blocks of {size} sublayers; flash-linear-attention has 1 (Full) and even numbers"
        )


def _finish(
    folder: CheckpointFolder,
    tensors: Mapping[str, StoredTensor],
    known: list[str],
    problems: dict[str, list[str]],
    fields: Mapping[str, Any],
    embedding: str,
) -> None:
    """Raise for everything that is wrong with the tensors of a folder."""
    problems["not in the model"] = unknown(tensors, known)
    raise_problems(f"{folder.path} does not fit its config", problems)
    if fields["tie_word_embeddings"] and HEAD in tensors and not same_bytes(tensors[HEAD], tensors[embedding]):
        raise CheckpointError(f"{folder.path}: tie_word_embeddings is true, but {HEAD} and {embedding} differ")


def _config(fla: Mapping[str, Any], own: Own) -> dict[str, Any]:
    came = own.origin.get("config") if own.origin.get("kind") == FlashLinearAttention.kind else None
    if not isinstance(came, dict):
        return {"architectures": ["TransformerForCausalLM"], "model_type": MODEL_TYPE, **fla}
    if came.get(BLOCK_SIZE) == fla[BLOCK_SIZE] and to_base(came, own.folder) == to_base(fla, own.folder):
        return dict(came)
    return {**{name: value for name, value in came.items() if name != "torch_dtype"}, **fla}
