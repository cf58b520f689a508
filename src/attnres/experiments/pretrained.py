"""Weights of a Hugging Face checkpoint folder: their checksum, and the plain model with exactly them.

Safetensors only, from the local disk, and no code of the checkpoint: what is read is numbers. Transformers fills what a
checkpoint lacks with random numbers and a warning; here that is an error.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from attnres.data.shards import file_sha256
from attnres.errors import CheckpointError, ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weights_sha256(folder: Path, expected: str | None = None) -> str:
    """Checksum of the weights in a folder: that of the file, or of the checksums of its parts in order of name.

    Args:
        folder: Of a Hugging Face checkpoint.
        expected: The checksum it has to have; None takes any.

    Raises:
        CheckpointError: The folder has no weights in safetensors.
        ConfigError: The checksum is not the expected one.
    """
    files = _weight_files(folder)
    sums = [_file_sha256(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    seen = sums[0] if len(sums) == 1 else hashlib.sha256("\n".join(sums).encode()).hexdigest()
    if expected is not None and seen != expected:
        raise ConfigError(
            f"model.pretrained is {folder}, whose weights have the SHA-256 {seen}; allowed: {expected}, as recorded"
        )
    return seen


def load_pretrained(folder: Path, expected: str | None = None) -> Any:
    """The plain causal language model of a folder, in float32.

    Args:
        folder: Of a Hugging Face checkpoint.
        expected: The checksum of its weights; None takes any.

    Raises:
        CheckpointError: Weights are missing, damaged, or do not fit the config.
        ConfigError: The checksum is not the expected one.
    """
    weights_sha256(folder, expected)
    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # they are told below, all of them
                output_loading_info=True,
            )
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"the weights in {folder} are damaged: {_first_line(error)}") from error
    model, found = loaded
    keys = {"missing": "missing_keys", "not in this model": "unexpected_keys", "of another shape": "mismatched_keys"}
    problems = {what: sorted(map(_told, found[key])) for what, key in keys.items() if found[key]}
    if problems:
        told = "; ".join(f"{what}: {', '.join(names)}" for what, names in problems.items())
        raise CheckpointError(f"the weights in {folder} do not fit its config.json: {told}")
    return model


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    names = [SINGLE]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is damaged: {error!r}") from error
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no {name}; allowed: a Hugging Face folder with weights in safetensors")
    return [folder / name for name in names]


@lru_cache(maxsize=64)
def _file_sha256(file: Path, size: int, modified: int) -> str:
    """Once per state of a file: several runs of one process start from the same one."""
    del size, modified
    return file_sha256(file)


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar and no advice about keys: what is wrong with them is raised."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def _told(key: Any) -> str:
    """A key, or a key with the shapes of checkpoint and model."""
    if isinstance(key, str):
        return key
    name, saved, wanted = key
    return f"{name} {list(saved)} instead of {list(wanted)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
