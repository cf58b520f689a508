"""State and sites of MRLA."""

from dataclasses import dataclass
from math import sqrt
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attnres.residual.drawing import draw_normal
from attnres.residual.site import Site


@final
@dataclass(frozen=True)
class Retrieved:
    """The running sum, and what layer attention looks back at."""

    hidden: Tensor
    """``[*batch, dim]``, what is read next."""
    values: tuple[Tensor, ...] = ()
    """Base form: the outputs so far, oldest first, each times its value weight."""
    attended: Tensor | None = None
    """Light form: what was added last; absent before the first sublayer."""
    keys: tuple[Tensor, ...] = ()
    """Base form: the keys of the outputs; in no read or write themselves."""

    @property
    def held(self) -> tuple[Tensor, ...]:
        """What is looked back at."""
        return self.values if self.attended is None else (self.attended,)


pytree.register_dataclass(Retrieved, field_names=["hidden", "values", "attended", "keys"])


@final
class LayerAttentionSite(Site):
    """Filters across channels that make query and key of an output, and one value weight a channel, zero at start."""

    def __init__(self, dim: int, kernel: int, place: int, *, carries: bool, eps: float, device: Any, dtype: Any):
        super().__init__()
        self.eps, self.place, self.carries = eps, place, carries
        options = {"device": device, "dtype": dtype}
        self.query_kernel = nn.Parameter(torch.empty(kernel, **options))
        self.key_kernel = nn.Parameter(torch.empty(kernel, **options))
        self.value_weight = nn.Parameter(torch.empty(dim, **options))
        if carries:
            self.carry = nn.Parameter(torch.empty(dim, **options))
        if not self.value_weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random filters, values of zero, and what was added before carried on as it is."""
        for number, kernel in enumerate((self.query_kernel, self.key_kernel)):
            draw_normal(kernel, std=(3 * len(kernel)) ** -0.5, place=2 * self.place + number)
        nn.init.zeros_(self.value_weight)
        if self.carries:
            nn.init.ones_(self.carry)

    def filtered(self, output: Tensor, kernel: Tensor) -> Tensor:
        """An output, normalised over its channels, after a filter along them."""
        normed = F.rms_norm(output, output.shape[-1:], eps=self.eps)
        padded = F.pad(normed, (len(kernel) // 2, len(kernel) // 2))
        return padded.unfold(-1, len(kernel), 1) @ kernel.to(output.dtype)


def head_scores(heads: int, query: Tensor, key: Tensor) -> Tensor:
    """One score per head, ``[*batch, heads]``."""
    product = (query * key).unflatten(-1, (heads, -1))
    return product.sum(-1) / sqrt(product.shape[-1])


def spread(weights: Tensor, dim: int) -> Tensor:
    """A weight per head, given to each of its channels."""
    return weights.repeat_interleave(dim // weights.shape[-1], dim=-1)
