"""All global random number generators, seeded together and saved as JSON.

Models draw from PyTorch's generators (dropout); callbacks and libraries may draw from numpy's and Python's. JSON, and
not what `torch.save` writes, because a checkpoint must not be able to run code.
"""

import base64
import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """State of all generators as JSON values."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Put all generators where `random_state` found them; GPU generators as far as there are GPUs."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_decode(state["torch"]))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index, encoded in enumerate(state["cuda"][:count]):
        torch.cuda.set_rng_state(_decode(encoded), index)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(encoded: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.uint8)
