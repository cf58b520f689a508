"""What a run ran on: commit, versions, machine, mesh. Read by people; nothing in the program depends on it."""

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch

import attnres
from attnres.parallel.config import ParallelConfig
from attnres.provenance import checkout, cpu_model
from attnres.train.config import RunConfig

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def describe_environment(config: RunConfig) -> dict[str, Any]:
    """Contents of ``environment.json`` for a resolved config."""
    train = config.train
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
        **describe_mesh(config.parallel),
        "hosts": _hosts(config.parallel),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def describe_mesh(layout: ParallelConfig) -> dict[str, Any]:
    """Processes of a run and how they share it, as ``environment.json`` and ``result.json`` have it.

    What a mesh without stages or data ranks has no use for is None.
    """
    is_staged, shares_rows = layout.stages > 1, layout.data > 1
    return {
        "processes": layout.size,
        "mesh": {
            "pipeline": layout.pipeline,
            "data": layout.data,
            "tensor": layout.tensor,
            "virtual": layout.virtual,
            "schedule": layout.settled_schedule if is_staged else None,
            "cuts": list(layout.cuts) if is_staged and layout.cuts is not None else None,
            "cache": layout.cache if is_staged else None,
            "sharding": layout.sharding if shares_rows else None,
        },
    }


def _hosts(layout: ParallelConfig, environment: Mapping[str, str] = os.environ) -> int | None:
    """Hosts by torchrun's count, which starts one agent on each; None where another launcher started the processes."""
    agents = environment.get("GROUP_WORLD_SIZE", "")
    return 1 if layout.size == 1 else int(agents) if agents.isdecimal() else None


def _commit() -> dict[str, Any] | None:
    found = checkout()
    return None if found is None else {"hash": found[0], "dirty": found[1]}
