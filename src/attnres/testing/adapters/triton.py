"""Our Triton kernels, on a GPU or in Triton's interpreter on CPU tensors."""

from typing import final

import torch

from attnres.ops import Backend
from attnres.testing.adapters.ours import Ours
from attnres.testing.interpreter import is_interpreting, kernels_for_cpu


@final
class Triton(Ours):
    """The Triton backend."""

    name = "attnres triton"
    backend: Backend = "triton"
    device = "cuda"

    def __init__(self) -> None:
        self.is_interpreted = is_interpreting()
        if self.is_interpreted:
            kernels_for_cpu()
            self.device, self.backend, self.max_sublayers = "cpu", "cpu", 26
            self.dtypes = (torch.float64, torch.float32, torch.bfloat16)  # the dtypes that are let through on a CPU
