"""The model and the data that a run's config asks for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, KimiLinearConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

from attnres.data import Dataset, default_dataset, open_dataset
from attnres.data.tokenizer import end_of_text_id
from attnres.errors import ConfigError, DataError
from attnres.experiments.pretrained import load_pretrained, weights_sha256
from attnres.models import build, convert
from attnres.models.given import config_of, read_settings, told_in_one_line
from attnres.parallel.weights import allocate
from attnres.train import DataConfig, ModelConfig, RunConfig


def build_model(config: RunConfig, *, weights: bool = True) -> Any:
    """A new model of a run; the seed decides the base weights, which are the same under every strategy.

    With ``model.pretrained`` the weights are those of the folder, and the model is converted.

    Args:
        config: The run.
        weights: Whether to read pretrained weights. Without them the folder need not be there, as for a run that has
            recorded its config and goes on from a checkpoint.

    Raises:
        ConfigError: The Hugging Face config cannot be read, the strategy does not fit the depth, or the pretrained
            weights are not the recorded ones.
        CheckpointError: The pretrained weights are missing, damaged or of another model.
        UnsupportedModelError: The family is not supported.
    """
    torch.manual_seed(config.train.seed)
    shape = hf_config(config.model, config.data)
    with told_in_one_line():
        if config.model.pretrained is None:
            return build(shape, config.residual, dtype=torch.float32)
        if weights:
            plain = load_pretrained(Path(config.model.pretrained), config.model.pretrained_sha256)
        else:
            plain = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
        torch.manual_seed(config.train.seed)
        return convert(plain, config.residual)


def unfilled_model(config: RunConfig) -> Any:
    """The model of a run without values, for a process that is sent what it keeps; memory is taken when that comes."""
    with torch.device("meta"):
        model = build_model(config, weights=False)
    return model if allocate(model) else build_model(config, weights=False)


def hf_config(model: ModelConfig, data: DataConfig) -> PreTrainedConfig:
    """The Hugging Face config that a model config stands for.

    Raises:
        ConfigError: ``hf_config`` or ``pretrained`` names a file that is missing or is not a config.
    """
    if model.pretrained is not None:
        source = model.hf_config or str(Path(model.pretrained) / "config.json")
        return _given_config(source, data, name="model.pretrained")
    if model.hf_config is not None:
        return _given_config(model.hf_config, data)
    shape = {
        "vocab_size": data.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "tie_word_embeddings": model.tie_word_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "initializer_range": model.initializer_range,
        "max_position_embeddings": max(data.context, 2048),
        "bos_token_id": None,
        "eos_token_id": None,  # the tokenizer knows, see `record_end_of_text`
        "pad_token_id": None,
    }
    return {"llama": LlamaConfig, "qwen3": _qwen3, "kimi_linear": _kimi_linear}[model.family](**shape)


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """Id of the end of text that stands behind each document, if the tokenizer has one."""
    try:
        return end_of_text_id(tokenizer)
    except DataError:
        return None


def record_end_of_text(model: Any, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Let a model that learns from scratch say where its texts end: at its tokenizer's end of text, or nowhere.

    A pretrained model has learned where; it stays as it is.

    Args:
        model: From `build_model`; its config and its settings of generation are changed.
        config: What it was made from.
        tokenizer: Of the text that it learns.
    """
    if config.pretrained is not None:
        return
    end = end_of_text(tokenizer)
    model.config.eos_token_id = end
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = end


def open_data(data: DataConfig) -> Dataset:
    """The dataset of a run; the bundled corpus is tokenized on first use.

    Raises:
        DataError: The dataset is missing or damaged.
    """
    if data.dataset == "bundled":
        return default_dataset(vocab_size=data.vocab_size)
    return open_dataset(Path(data.dataset))


def _qwen3(**shape: Any) -> Qwen3Config:
    return Qwen3Config(head_dim=shape["hidden_size"] // shape["num_attention_heads"], **shape)


def _kimi_linear(**shape: Any) -> KimiLinearConfig:
    """Kimi Linear at any width: three KDA layers to one MLA layer, eight experts, two of them active.

    Its MLA has as many key and value heads as query heads, whatever the model config says.
    """
    shape = {**shape, "num_key_value_heads": shape["num_attention_heads"]}
    head = shape["hidden_size"] // shape["num_attention_heads"]
    layers = range(shape["num_hidden_layers"])
    return KimiLinearConfig(
        layer_types=["full_attention" if layer % 4 == 3 else "linear_attention" for layer in layers],
        moe_intermediate_size=shape["intermediate_size"] // 2,
        num_local_experts=8,
        num_experts_per_tok=2,
        kv_lora_rank=shape["hidden_size"] // 4,
        qk_nope_head_dim=head,
        qk_rope_head_dim=head // 2,
        v_head_dim=head,
        linear_head_dim=head,
        linear_num_heads=shape["num_attention_heads"],
        **shape,
    )


def self_contained(config: RunConfig) -> RunConfig:
    """The same run with the content of a Hugging Face config in place of its path, so that its folder holds all of it.

    Pretrained weights are too large for that; the folder gets their checksum, and the read scale of conversion.

    Raises:
        ConfigError: The file is missing or is not a config, or the pretrained weights are not the recorded ones.
        CheckpointError: The pretrained weights are missing.
    """
    model = config.model
    if model.pretrained is not None:
        return replace(config, model=_recorded(model), residual=config.residual.with_read_scale("sum"))
    if model.hf_config is None:
        return config
    return replace(config, model=replace(model, hf_config=_content(model.hf_config)))


def _recorded(model: ModelConfig) -> ModelConfig:
    """With config and checksum of the pretrained folder; a folder that is gone by now leaves the record as it is."""
    folder = Path(model.pretrained or "")
    if model.pretrained_sha256 is not None and model.hf_config is not None and not folder.exists():
        return model
    content = _content(str(folder / "config.json"), name="model.pretrained")
    return replace(model, hf_config=content, pretrained_sha256=weights_sha256(folder, model.pretrained_sha256))


def _content(source: str, *, name: str = "model.hf_config") -> str:
    return json.dumps(_read_hf_config(source, name=name), sort_keys=True)


def _given_config(source: str, data: DataConfig, *, name: str = "model.hf_config") -> PreTrainedConfig:
    config = config_of(_read_hf_config(source, name=name))
    seen = getattr(config, "vocab_size", None)
    if seen != data.vocab_size:
        raise ConfigError(f"{name} has vocab_size {seen}; allowed: {data.vocab_size}, the data's (data.vocab_size)")
    return config


def _read_hf_config(source: str, *, name: str = "model.hf_config") -> dict[str, Any]:
    """The settings in a ``config.json``, or in its content."""
    settings = read_settings(source, name=name)
    if name == "model.pretrained" and "attnres" in settings:
        place = "its content" if source.lstrip().startswith("{") else source
        raise ConfigError(f"{name} is {place}, a model that is converted already; allowed: a plain one")
    return settings
