"""liger-kernel: its Triton kernel, on a GPU or in Triton's interpreter."""

import importlib
from collections.abc import Sequence
from importlib import metadata
from typing import final

import torch
from torch import Tensor

from attnres.testing.adapter import Adapter, NotApplicable
from attnres.testing.interpreter import is_interpreting, repair


@final
class Liger(Adapter):
    """`LigerAttnResFunction`, on stacked sources."""

    name = "liger-kernel"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(self) -> None:
        self.version = metadata.version("liger-kernel")
        self.function = importlib.import_module("liger_kernel.ops.attn_res").LigerAttnResFunction
        self.is_interpreted = is_interpreting()
        if self.is_interpreted:
            repair()
        self.device = "cpu" if self.is_interpreted else "cuda"

    def read(self, sources: Sequence[Tensor], query: Tensor, key_weight: Tensor | None, *, eps: float) -> Tensor:
        """One call."""
        if len({source.dtype for source in sources}) > 1:
            raise NotApplicable("takes one packed tensor, so sources have one dtype")
        return self.function.apply(torch.stack(tuple(sources)), query, key_weight, eps)
