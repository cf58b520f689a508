"""Manifold-constrained hyper-connections: several streams, mixed by a doubly stochastic matrix."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final, get_args

import torch
from torch import Tensor

from attnres.errors import ConfigError
from attnres.residual.rivals.constrained import UNLIKELY, ConstrainedStreams, HeadSite
from attnres.residual.site import Site

Merge = Literal["sum", "learned"]


@final
@dataclass(frozen=True, kw_only=True)
class ManifoldHyperConnections(ConstrainedStreams):
    """mHC: ``h = pre^T X``, ``X <- res X + post v^T`` with ``res`` doubly stochastic by Sinkhorn's iteration.

    ``pre = sigmoid(.)``, ``post = 2 sigmoid(.)``, ``res = Sinkhorn(exp(.))``, each of a bias plus 0.01 times a
    projection of the normalised streams. The embedding is copied into every stream, and the output read is their sum.

    Easy to get wrong: a round of the iteration first makes what each old stream gives away sum to one, then what each
    new stream is made of (the paper, DeepSeek-V4), and a finite number of rounds is exact in the latter only. Public
    ports in the line of the `hyper-connections` package take the two in the other order, and the package makes the
    logits of a stream from that stream alone instead of from all together. DeepSeek-V4 as in Transformers is
    ``map_eps=1e-6, output="learned"``; its initial values (normal projections, scales of 1, biases of 0) are not ours.

    Parameters: m D (2m + m^2) + 2m + m^2 + 3 a site. State: m tensors. Moves: 3m + 2 tensors a sublayer, fused.
    """

    short_name: ClassVar[str] = "mhc"
    formula: ClassVar[str] = "h = pre^T X;  X <- res X + post v^T;  res = Sinkhorn(exp(.)) of the streams"
    citation: ClassVar[str] = "mHC, arXiv 2512.24880"

    sinkhorn_iterations: int = 20
    """Row and column normalisations that make the mixing matrix doubly stochastic."""
    map_eps: float = 0.0
    """Added to ``pre``, to the first normalised rows of ``res`` and to every later sum of it; DeepSeek-V4 has 1e-6."""
    output: Merge = "sum"
    """How the streams become the output read: ``"sum"``, or ``"learned"`` weights of the form of ``pre``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("streams", "sinkhorn_iterations"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value!r}; allowed is a whole number of 1 or more")
        if not 0 <= self.map_eps < 1:
            raise ConfigError(f"map_eps is {self.map_eps!r}; allowed is 0 or more, and below 1")
        if self.output not in get_args(Merge):
            raise ConfigError(f'output is {self.output!r}; allowed are "sum" and "learned"')

    @property
    def label(self) -> str:
        """Name and streams, for tables and legends."""
        return f"mHC ({self.streams} streams)"

    def initial_mixing(self) -> Tensor:
        """Logits of 0 on the diagonal and far less elsewhere."""
        return (UNLIKELY * (1 - torch.eye(self.streams, device="cpu"))).flatten()

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site that starts by leaving the streams apart; the output site has parameters if it is learned."""
        if index == num_sublayers and self.output == "learned":
            return HeadSite(dim, self.streams, eps=eps, device=device, dtype=dtype)
        return super().site(index, num_sublayers, dim, eps=eps, device=device, dtype=dtype)

    def pre(self, streams: Tensor, site: Site) -> Tensor:
        """Sigmoids; ones at the output unless it is learned."""
        if isinstance(site, HeadSite):
            return site.logits(streams).sigmoid() + self.map_eps
        weights = super().pre(streams, site)
        return weights if type(site) is Site else weights + self.map_eps

    def doubly_stochastic(self, logits: Tensor) -> Tensor:
        """Sinkhorn's iteration on the exponentials."""
        square = logits.unflatten(-1, (self.streams, self.streams))
        if self.map_eps == 0:
            return sinkhorn(square, self.sinkhorn_iterations)
        return damped_sinkhorn(square, self.sinkhorn_iterations, self.map_eps)


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """The doubly stochastic matrix near ``exp(logits)``, by normalising rows and columns in turn in the logarithm."""
    for _ in range(iterations):
        logits = logits - logits.logsumexp(-1, keepdim=True)
        logits = logits - logits.logsumexp(-2, keepdim=True)
    return logits.exp()


def damped_sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """The same with ``eps`` added to the first normalised rows and to every later sum, as DeepSeek-V4 has it."""
    matrix = logits.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix
