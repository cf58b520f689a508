"""A model and its tokenizer from a checkpoint folder, completely or not at all.

Transformers starts weights that a checkpoint lacks anew, ignores those it does not know, and says so in a warning. Here
each of these is an error, and nothing in the folder is run.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from attnres.errors import AttnResError, CheckpointError
from attnres.interop.folder import CheckpointFolder, raise_problems
from attnres.interop.stored import same_bytes

_MOST_MISSING = 2
"""Parameters that a config may describe for each that the files hold: some are tied, and written once."""
KEYS = {"missing": "missing_keys", "not in this model": "unexpected_keys", "of another shape": "mismatched_keys"}
BROKEN = (
    SafetensorError,
    StrictDataclassError,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
    ImportError,
)
"""What Transformers and torch raise for a folder that is wrong somewhere; they have no class of their own for it."""


def load_model(folder: CheckpointFolder, *, dtype: torch.dtype | str = torch.float32, device: str = "cpu") -> Any:
    """The causal language model of a folder, in evaluation mode.

    Args:
        folder: From `open_folder`.
        dtype: Of the parameters; ``"auto"`` is that of the checkpoint.
        device: Where to.

    Raises:
        CheckpointError: Transformers does not know the family, or the weights do not fit the config.
    """
    check_config(folder)
    return _load(folder, dtype, device)


def load_model_and_tokenizer(
    folder: CheckpointFolder, *, dtype: torch.dtype | str = torch.float32, device: str = "cpu"
) -> tuple[Any, Any]:
    """`load_model` and `load_tokenizer`, in an order in which what is quick to refuse is refused first."""
    check_config(folder)
    words = load_tokenizer(folder.path)
    return _load(folder, dtype, device), words


def _load(folder: CheckpointFolder, dtype: torch.dtype | str, device: str) -> Any:
    try:
        with _quietly():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder.path,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # they are told below, all of them
                output_loading_info=True,
            )
    except AttnResError:
        raise
    except BROKEN as error:
        raise CheckpointError(f"{folder.path} cannot be loaded: {first_sentence(error)}") from error
    model, found = loaded
    problems = {what: sorted(str(key) for key in found[key_name]) for what, key_name in KEYS.items()}
    raise_problems(f"the weights in {folder.path} do not fit its config", problems)
    _check_ties(folder, model)
    return model.to(device).eval()


def check_config(folder: CheckpointFolder) -> None:
    """Refuse a config that Transformers does not understand, or that describes more than the files hold.

    The model is made without memory for its weights, and counted, before anything is allocated.

    Raises:
        CheckpointError: With the reason.
    """
    if "auto_map" in folder.config and "model_type" not in folder.config:
        raise CheckpointError(f"{folder.path} is loaded by code of its own (auto_map), which is not run")
    layers, count = folder.config.get("num_hidden_layers", 0), len(folder.tensors)
    if isinstance(layers, int) and layers > count:
        raise CheckpointError(f"{folder.path}: num_hidden_layers is {layers}, but the files hold {count} tensors")
    try:
        with _quietly():
            config = AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
            with torch.device("meta"):
                described = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    except AttnResError:
        raise
    except BROKEN as error:
        raise CheckpointError(f"the config in {folder.path} cannot be used: {first_sentence(error)}") from error
    held = sum(math.prod(tensor.shape) for tensor in folder.tensors.values())
    if described > _MOST_MISSING * held and "quantization_config" not in folder.config:
        raise CheckpointError(
            f"{folder.path}: the config describes {described:,} parameters, but the files hold {held:,}"
        )
    context = getattr(config, "max_position_embeddings", None)
    if isinstance(context, int) and context < 1:
        raise CheckpointError(f"{folder.path}: max_position_embeddings is {context}; allowed: 1 or more")


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a folder.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise CheckpointError(f"{path} has no tokenizer (tokenizer.json or tokenizer_config.json)")
    try:
        with _quietly():
            return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain exceptions
        raise CheckpointError(f"the tokenizer in {path} cannot be loaded: {first_sentence(error)}") from error


def _check_ties(folder: CheckpointFolder, model: Any) -> None:
    """Refuse weights that the config ties, and that differ in the files; Transformers would take one of the two."""
    default = getattr(type(model.config)(), "tie_word_embeddings", False)
    if not folder.config.get("tie_word_embeddings", default):
        return
    for one, other in dict(getattr(model, "_tied_weights_keys", None) or {}).items():
        first, second = folder.tensors.get(one), folder.tensors.get(other)
        if first is not None and second is not None and not same_bytes(first, second):
            raise CheckpointError(
                f"{folder.path}: tie_word_embeddings is true, but {one} and {other} differ; allowed are equal ones, or "
                "tie_word_embeddings=false"
            )


def first_sentence(error: Exception) -> str:
    """What an exception says first, in one line."""
    return " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__


@contextmanager
def _quietly() -> Iterator[None]:
    """No advice about keys: what is wrong with them is raised. Progress bars are for terminals."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
