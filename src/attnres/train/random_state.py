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


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Seed one of several processes: rank 0 as a single process is, the others apart from it and from each other.

    Args:
        seed: Of the run.
        rank: Which process.
        step: Where the run goes on, when it had no such process before.
    """
    if rank == 0 and step == 0:
        seed_everything(seed)
    else:
        seed_everything(int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)[0]) >> 1)


def random_state(*, one_gpu: bool = False) -> dict[str, Any]:
    """State of all generators as JSON values; with ``one_gpu`` that of this process's own GPU alone."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],
        "torch": _encode(torch.get_rng_state()),
        "cuda": _gpu_states(one_gpu) if torch.cuda.is_available() else [],
    }


def _gpu_states(one_gpu: bool) -> list[str]:
    states = [torch.cuda.get_rng_state()] if one_gpu else torch.cuda.get_rng_state_all()
    return [_encode(state) for state in states]


def restore_random_state(state: dict[str, Any], *, one_gpu: bool = False) -> None:
    """Put all generators where `random_state` found them; GPU generators as far as there are GPUs."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_decode(state["torch"]))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if one_gpu and count and state["cuda"]:
        torch.cuda.set_rng_state(_decode(state["cuda"][0]))
        return
    for index, encoded in enumerate(state["cuda"][:count]):
        torch.cuda.set_rng_state(_decode(encoded), index)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(encoded: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.uint8)
