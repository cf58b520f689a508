"""Continue prompts with a model from a run folder or from a Hugging Face folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig

from attnres.errors import CheckpointError, ConfigError
from attnres.experiments.folders import kind_of
from attnres.experiments.models import end_of_text
from attnres.experiments.trained import load_trained
from attnres.interop.folder import open_folder
from attnres.interop.loading import BROKEN, first_sentence, load_model_and_tokenizer
from attnres.train import resolve_device

PaddingSide = Literal["left", "right"]


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A model with what turns text into its token ids and back."""

    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    pad_id: int


def load_text_model(folder: Path) -> TextModel:
    """The model of a run's newest checkpoint, or of a Hugging Face folder, whichever the folder is.

    Raises:
        ConfigError, CheckpointError, DataError: It is neither, or it is damaged.
    """
    if kind_of(folder) == "hugging-face":
        model, words = load_model_and_tokenizer(open_folder(folder), dtype="auto", device=resolve_device("auto"))
        return TextModel(
            model=model,
            encode=lambda text: words(text).input_ids,
            decode=lambda ids: words.decode(ids, skip_special_tokens=True),
            pad_id=words.pad_token_id if words.pad_token_id is not None else words.eos_token_id or 0,
        )
    trained = load_trained(folder)
    end = end_of_text(trained.tokenizer)
    return TextModel(
        model=trained.model,
        encode=lambda text: trained.tokenizer.encode(text).ids,
        decode=lambda ids: trained.tokenizer.decode(_without_ends(ids, end), skip_special_tokens=True),
        pad_id=end or 0,  # what follows the end of a text that is done before others
    )


def continue_prompts(
    text_model: TextModel,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    padding_side: PaddingSide | None = None,
    chunk_size: int | None = None,
) -> list[str]:
    """Each prompt with what the model adds to it.

    Args:
        text_model: From `load_text_model`.
        prompts: One or several; several of unequal length are padded.
        max_new_tokens: Tokens to add.
        temperature: Of sampling; 0 takes the likeliest token each time.
        top_k: Sample from this many likeliest tokens.
        seed: Of sampling.
        padding_side: Where shorter prompts are padded; ``"left"``, as a decoder goes on at the end of a row.
        chunk_size: Tokens of the prompt that go through the model at a time; None takes all at once.

    Raises:
        ConfigError: A prompt has no tokens or does not fit into the context, or prompts of unequal length come without
            a side to pad.
    """
    rows = [text_model.encode(prompt) for prompt in prompts]
    _check(text_model.model, prompts, rows, max_new_tokens, padding_side)
    ids, mask = _padded(rows, text_model.pad_id)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature else {"do_sample": False}
    torch.manual_seed(seed)
    model = text_model.model
    given = getattr(model, "generation_config", None)
    settings = GenerationConfig(  # of a folder's own settings only where a text ends; the rest is asked for here
        max_new_tokens=max_new_tokens,
        pad_token_id=text_model.pad_id,
        eos_token_id=getattr(given, "eos_token_id", None),
        prefill_chunk_size=chunk_size,
        **sampling,
    )
    model.generation_config = settings
    try:
        outputs = model.generate(ids.to(model.device), attention_mask=mask.to(model.device), generation_config=settings)
    except BROKEN as error:
        raise CheckpointError(
            f"the {type(model).__name__} cannot continue the prompt: {first_sentence(error)}"
        ) from error
    longest = ids.shape[1]
    return [text_model.decode(output[longest - len(row) :].tolist()) for row, output in zip(rows, outputs, strict=True)]


def _without_ends(ids: list[int], end: int | None) -> list[int]:
    """Tokens up to the end of a text; an own tokenizer's end is not special, so it would be decoded."""
    last = len(ids)
    while last and ids[last - 1] == end:
        last -= 1
    return ids[:last]


def _check(
    model: Any, prompts: Sequence[str], rows: list[list[int]], max_new_tokens: int, padding_side: PaddingSide | None
) -> None:
    context = getattr(model.config, "max_position_embeddings", None)
    for prompt, row in zip(prompts, rows, strict=True):
        if not row:
            raise ConfigError(f"prompt is {prompt!r}, which has no tokens; allowed: some text")
        if context is not None and len(row) + max_new_tokens > context:
            raise ConfigError(
                f"a prompt has {len(row)} tokens and max_new_tokens is {max_new_tokens}; allowed: together no more "
                f"than the model's context of {context}"
            )
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1 and padding_side != "left":
        raise ConfigError(
            f"prompts have from {lengths[0]} to {lengths[-1]} tokens and padding_side is {padding_side!r}; allowed is "
            "'left', since a decoder goes on at the end of a row"
        )


def _padded(rows: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    ids = [[pad_id] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)
