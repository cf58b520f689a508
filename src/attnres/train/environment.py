"""What a run ran on: commit, versions, machine. Read by people; nothing in the program depends on it."""

import platform
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch

import attnres
from attnres.provenance import checkout, cpu_model
from attnres.train.config import TrainConfig

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def describe_environment(train: TrainConfig) -> dict[str, Any]:
    """Contents of ``environment.json`` for a resolved config."""
    return {
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            "attnres": attnres.__version__,
            **{package: metadata.version(package) for package in _PACKAGES},
        },
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "threads": train.threads,
        "device": train.device,
        "gpu": torch.cuda.get_device_name() if train.device == "cuda" else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit() -> dict[str, Any] | None:
    found = checkout()
    return None if found is None else {"hash": found[0], "dirty": found[1]}
