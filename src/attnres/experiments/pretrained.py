"""The trained model that a run starts from: the checksum of its weights, and the plain model with exactly them."""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from attnres.data.shards import file_sha256
from attnres.errors import ConfigError
from attnres.interop.folder import CheckpointFolder, open_folder
from attnres.interop.loading import load_model


def load_pretrained(folder: Path, expected: str | None = None) -> Any:
    """The plain causal language model of a Hugging Face folder, in float32; no code of the folder is run.

    Args:
        folder: With ``config.json`` and weights in safetensors.
        expected: The checksum of its weights; None takes any.

    Raises:
        CheckpointError: Weights are missing, damaged, or do not fit the config.
        ConfigError: The checksum is not the expected one.
    """
    opened = open_folder(folder)
    _checksum(opened, expected)
    return load_model(opened)


def weights_sha256(folder: Path, expected: str | None = None) -> str:
    """Checksum of the weights in a folder: that of the file, or of the checksums of its parts in order of name.

    Args:
        folder: Of a Hugging Face checkpoint.
        expected: The checksum it has to have; None takes any.

    Raises:
        CheckpointError: The folder has no weights in safetensors, or they are damaged.
        ConfigError: The checksum is not the expected one.
    """
    return _checksum(open_folder(folder), expected)


def _checksum(folder: CheckpointFolder, expected: str | None) -> str:
    files = sorted({tensor.file for tensor in folder.tensors.values()})
    sums = [_file_sha256(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    seen = sums[0] if len(sums) == 1 else hashlib.sha256("\n".join(sums).encode()).hexdigest()
    if expected is not None and seen != expected:
        raise ConfigError(
            f"model.pretrained is {folder.path}; its weights have the SHA-256 {seen}; allowed: {expected}, as recorded"
        )
    return seen


@lru_cache(maxsize=64)
def _file_sha256(file: Path, size: int, modified: int) -> str:
    """Once per state of a file: several runs of one process start from the same one."""
    del size, modified
    return file_sha256(file)
