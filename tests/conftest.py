"""Settings for every test: no hub, one thread, fixed seeds, and warnings as errors (in pyproject.toml)."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
