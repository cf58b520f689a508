"""A model of a few linear sublayers around a residual, small enough for float64 and for looking inside."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.analysis.mixing import MixingListener
from attnres.residual import OUTPUT, Residual, Strategy

DIM, SUBLAYERS, EPS = 8, 8, 1e-6


class Norm(nn.Module):
    """An RMSNorm with the attribute names of Transformers' norms."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(1 + 0.3 * torch.randn(dim)), EPS

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)


class Toy(nn.Module):
    """Sublayers ``f(norm(h))`` that mix channels and tokens; a site with several views sums what it makes of each."""

    def __init__(self, strategy: Strategy, *, dim: int = DIM, sublayers: int = SUBLAYERS):
        super().__init__()
        self.norms = nn.ModuleList(Norm(dim) for _ in range(sublayers))
        self.linears = nn.ModuleList(nn.Linear(3 * dim, dim, bias=False) for _ in range(sublayers))
        for linear in self.linears:
            nn.init.normal_(linear.weight, std=1.5 * dim**-0.5)
        self.residual = Residual(strategy, sublayers, dim, eps=EPS, norms=list(self.norms))

    def sublayer(self, index: int, read: Tensor) -> Tensor:
        site = self.residual.site(index)
        normed = read if site.takes_norm else self.norms[index](read)
        views = normed.unbind(-2) if site.views > 1 else (normed,) * 3
        return torch.tanh(self.linears[index](torch.cat(views, dim=-1))) * (1 + index % 3)

    def forward(self, embedding: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """All reads, the output read last, and all outputs (or what is written in their place)."""
        state = self.residual.start(embedding)
        reads, outputs = [], []
        for index in range(self.residual.num_sublayers):
            reads.append(self.residual.read(state, index))
            output = self.sublayer(index, reads[-1])
            outputs.append(self.residual.strategy.source_of(state, self.residual.site(index), output))
            state = self.residual.write(state, index, output)
        return [*reads, self.residual.read(state, OUTPUT)], outputs


def toy(
    strategy: Strategy, *, seed: int = 0, dtype: torch.dtype = torch.float64, scramble: float = 0.7, **shape
) -> Toy:
    """A toy whose residual has random parameters, away from where they start."""
    torch.manual_seed(seed)
    model = Toy(strategy, **shape).to(dtype)
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(scramble * torch.randn_like(parameter))
    return model


def mixing_of(model: Toy, embedding: Tensor, view: int = 0) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Mixing matrix ``[*batch, sites, sources, channels]``, reads and outputs of one pass."""
    listener = MixingListener(model.residual)
    with torch.no_grad(), model.residual.listen(listener):
        reads, outputs = model(embedding)
    return listener.matrix(view), reads, outputs


def embedding() -> Tensor:
    """What the tests of formulas start from."""
    return torch.randn(2, 3, DIM, dtype=torch.float64)


def assert_reads(model: Toy, x: Tensor, expected: list[Tensor]) -> None:
    """Every read of a pass from ``x``, the output read last, is the one expected."""
    reads, _ = model(x)
    assert len(reads) == len(expected) == SUBLAYERS + 1
    for read, value in zip(reads, expected, strict=True):
        torch.testing.assert_close(read, value, rtol=1e-9, atol=1e-9)
