"""What a run ran on: commit, versions, machine. Read by people; nothing in the program depends on it."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import attnres
from attnres.train.config import TrainConfig

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def describe_environment(train: TrainConfig) -> dict[str, Any]:
    """Contents of ``environment.json`` for a resolved config."""
    return {
        "commit": commit(),
        "versions": {
            "python": platform.python_version(),
            "attnres": attnres.__version__,
            **{package: metadata.version(package) for package in _PACKAGES},
        },
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "threads": train.threads,
        "device": train.device,
        "gpu": torch.cuda.get_device_name() if train.device == "cuda" else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> dict[str, Any] | None:
    """Hash of the checkout that this package runs from, and whether it has changes; None for an installed package."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():  # not just any repository above us: an environment may lie inside one
        return None
    revision = _git(root, "rev-parse", "HEAD")
    if not revision:
        return None
    return {"hash": revision, "dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no"))}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
