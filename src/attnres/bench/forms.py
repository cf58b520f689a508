"""The forms of depth attention that are compared: ours, our reference, and what most repositories do.

A form takes its sources and vectors in the shape it likes best, made before the clock starts: a form that wants the
sources packed in one tensor is given such a tensor and not charged for the packing, one without key weight is given the
product of query and key weight. That is kinder to it than a model would be.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnres.bench.inputs import Inputs
from attnres.ops import Backend, depth_attention
from attnres.ops.backends import resolve

EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Form:
    """One implementation of a read."""

    name: str
    read: Callable[..., Tensor]
    """From sources (a list, or a packed tensor) and vectors to the mix ``[tokens, dim]``."""
    is_ours: bool = False
    packed: bool = False
    """Takes one tensor ``[sources, tokens, dim]`` instead of a list."""
    folded: bool = False
    """Has no key weight, so it takes the product of query and key weight as its query."""
    vectors_as_sources: bool = False
    """Wants query and key weight in the dtype of the sources; otherwise they are float32."""

    def problem(self, inputs: Inputs) -> "Problem":
        """This form with its own view of the inputs."""
        sources = [inputs.packed] if self.packed else inputs.sources
        vectors = [inputs.query * inputs.weight] if self.folded else [inputs.query, inputs.weight]
        dtype = inputs.dtype if self.vectors_as_sources else torch.float32
        leaves = [vector.detach().to(dtype, copy=True).requires_grad_() for vector in vectors]
        return Problem(self, sources, leaves, inputs.grad)

    def compiled(self) -> "Form":
        """The same under ``torch.compile``, for exact shapes."""
        return replace(self, name=f"{self.name}, compiled", read=torch.compile(self.read, dynamic=False))


@dataclass(frozen=True)
class Problem:
    """A form with its inputs: what the clock runs."""

    form: Form
    sources: Sequence[Tensor]
    vectors: Sequence[Tensor]
    grad: Tensor

    def value(self) -> Tensor:
        """The mix."""
        return self.form.read(self.sources[0] if self.form.packed else self.sources, *self.vectors)

    def forward(self) -> Tensor:
        """The mix as in inference, nothing kept for a backward."""
        with torch.no_grad():
            return self.value()

    def forward_backward(self) -> Any:
        """Gradients of all sources and vectors; given back and not added into ``.grad``, which would cost passes."""
        return torch.autograd.grad(self.value(), [*self.sources, *self.vectors], self.grad, allow_unused=True)


def ours(device: torch.device, dtype: torch.dtype) -> list[Form]:
    """`attnres.ops.depth_attention`: the kernel it chooses here, if there is one, and the reference.

    The reference is our own earlier form, in PyTorch operations, and the definition of the others.
    """
    chosen = resolve("auto", [torch.empty(1, 1, dtype=dtype, device=device)])
    return [
        Form(name=f"attnres ({backend})", read=_ours(backend), is_ours=True)
        for backend in dict.fromkeys((chosen, "reference"))
    ]


def stacked() -> Form:
    """Stack, norm, einsum, softmax, einsum: the form of most public code."""
    return Form(name="stacked", read=_stacked)


def _ours(backend: Backend) -> Callable[..., Tensor]:
    def read(sources: Sequence[Tensor], query: Tensor, weight: Tensor) -> Tensor:
        return depth_attention(sources, query, weight, eps=EPS, backend=backend)

    return read


def _stacked(sources: Sequence[Tensor], query: Tensor, weight: Tensor) -> Tensor:
    values = torch.stack(tuple(sources))
    keys = torch.nn.functional.rms_norm(values.float(), values.shape[-1:], weight.float(), EPS)
    depth_weights = torch.einsum("std,d->st", keys, query.float()).softmax(0)
    return torch.einsum("st,std->td", depth_weights, values.float()).to(values.dtype)
