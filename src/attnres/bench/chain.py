"""All reads of a model together, without the work of its sublayers.

What a residual strategy costs is not one read but the chain of reads and writes, and in the backward the gradients that
a source collects from every later read. Here the strategy runs as in a model, around sublayers that cost nothing: each
takes its read, puts out a tensor that was drawn before, and in the backward takes the gradient of its output, which
autograd has added up by then, and hands a gradient to its read. Tensors come and go in the order of training.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnres.residual import OUTPUT, DepthSite, Residual, Strategy


@dataclass(frozen=True, kw_only=True)
class ChainInputs:
    """What the chains of all arms share."""

    embedding: Tensor
    outputs: list[Tensor]
    """One per sublayer, ``[tokens, dim]``."""
    grad: Tensor
    """The gradient that every read gets from what uses it."""
    queries: Tensor
    """Pseudo-queries of all sites, ``[sublayers + 1, dim]``; not zero, so that no read is a plain mean."""

    @classmethod
    def draw(
        cls, sublayers: int, tokens: int, dim: int, dtype: torch.dtype, device: torch.device, *, seed: int = 0
    ) -> "ChainInputs":
        """Random inputs."""
        random = torch.Generator(device).manual_seed(seed)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=random, device=device)

        return cls(
            embedding=draw(tokens, dim).to(dtype).requires_grad_(),
            outputs=[draw(tokens, dim).to(dtype) for _ in range(sublayers)],
            grad=draw(tokens, dim).to(dtype),
            queries=draw(sublayers + 1, dim) / dim**0.5,
        )

    def double(self) -> "ChainInputs":
        """The same numbers in float64."""
        return ChainInputs(
            embedding=self.embedding.detach().double().requires_grad_(),
            outputs=[output.double() for output in self.outputs],
            grad=self.grad.double(),
            queries=self.queries.double(),
        )


class Chain:
    """A strategy at the depth of its inputs.

    Parameters are float32, or float64 with float64 inputs.
    """

    def __init__(self, strategy: Strategy, inputs: ChainInputs):
        self.inputs = inputs
        embedding = inputs.embedding
        self.residual = Residual(
            strategy, len(inputs.outputs), embedding.shape[-1], device=embedding.device, dtype=inputs.queries.dtype
        )
        for site, query in zip(self.residual.sites, inputs.queries, strict=True):
            if isinstance(site, DepthSite):
                site.pseudo_query.data.copy_(query)

    def forward(self) -> Tensor:
        """All reads as in inference; the output read."""
        with torch.no_grad():
            return self._run()

    def forward_backward(self) -> tuple[Tensor | None, ...]:
        """Gradients of the embedding and of all parameters."""
        return self._gradients(self._run())

    def everything(self) -> list[Tensor | None]:
        """All reads and all gradients, those of the sublayer outputs (last first) included; for the check."""
        reads: list[Tensor] = []
        output_grads: list[Tensor] = []
        gradients = self._gradients(self._run(reads, output_grads))
        return [*reads, *output_grads, *gradients]

    def _run(self, reads: list[Tensor] | None = None, output_grads: list[Tensor] | None = None) -> Tensor:
        state = self.residual.start(self.inputs.embedding)
        for site, output in enumerate(self.inputs.outputs):
            read = self.residual.read(state, site)
            state = self.residual.write(state, site, _Sublayer.apply(read, output, self.inputs.grad, output_grads))
            if reads is not None:
                reads.append(read.detach())
            del read
        last = self.residual.read(state, OUTPUT)
        if reads is not None:
            reads.append(last.detach())
        return last

    def _gradients(self, last: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [self.inputs.embedding, *self.residual.parameters()]
        return torch.autograd.grad(last, leaves, self.inputs.grad, allow_unused=True)


class _Sublayer(torch.autograd.Function):
    """A sublayer whose work has been done before."""

    @staticmethod
    def forward(ctx: Any, read: Tensor, output: Tensor, grad: Tensor, output_grads: list[Tensor] | None) -> Tensor:
        del read
        ctx.grad, ctx.output_grads = grad, output_grads
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.output_grads is not None:
            ctx.output_grads.append(grads[0])
        return ctx.grad, None, None, None
