"""Our own backends and strategies."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from attnres import __version__
from attnres.ops import Backend, PartialSoftmax, depth_attention, inter_block, intra_block, use_backend
from attnres.residual import OUTPUT, BlockAttnRes, DepthSite, Residual
from attnres.testing.adapter import Adapter, Model
from attnres.testing.definition import Sublayer


class Ours(Adapter):
    """A backend of attnres; the reference unless a subclass says otherwise."""

    name = "attnres reference"
    version = __version__
    backend: Backend = "reference"

    def read(self, sources: Sequence[Tensor], query: Tensor, key_weight: Tensor | None, *, eps: float) -> Tensor:
        """`depth_attention`."""
        return depth_attention(sources, query, key_weight, eps=eps, backend=self.backend)

    def read_many(
        self, sources: Sequence[Tensor], queries: Tensor, key_weights: Tensor | None, *, eps: float
    ) -> Sequence[Tensor]:
        """`inter_block`."""
        mixed = inter_block(sources, queries, key_weights, eps=eps, backend=self.backend).mixed
        return list(mixed.to(sources[0].dtype))

    def two_phase(
        self,
        finished: Sequence[Tensor],
        partials: Sequence[Tensor | None],
        queries: Tensor,
        key_weights: Tensor | None,
        *,
        eps: float,
    ) -> Sequence[Tensor]:
        """`inter_block`, then `intra_block` for each read."""
        weights = torch.ones_like(queries) if key_weights is None else key_weights
        part = inter_block(finished, queries, weights, eps=eps, backend=self.backend)

        def finish(at: int, partial: Tensor | None) -> Tensor:
            mine = PartialSoftmax(part.mixed[at], part.lse[at])
            value = intra_block(
                mine, partial, queries[at], weights[at], eps=eps, dtype=finished[0].dtype, backend=self.backend
            )
            assert isinstance(value, Tensor)  # a pair only with an update
            return value

        return [finish(at, partial) for at, partial in enumerate(partials)]

    def model(self, num_sublayers: int, sublayers_per_block: int, dim: int, *, eps: float, dtype: torch.dtype) -> Model:
        """`Residual` with `BlockAttnRes`."""
        strategy = BlockAttnRes(sublayers_per_block=sublayers_per_block)
        residual = Residual(strategy, num_sublayers, dim, eps=eps, dtype=dtype, device=self.device)
        return _Stack(residual, self.backend)


@final
class Reference(Ours):
    """The reference in plain PyTorch."""


@final
class Cpu(Ours):
    """The C++ kernel."""

    name = "attnres cpu"
    backend: Backend = "cpu"
    dtypes = (torch.float64, torch.float32, torch.bfloat16)


class _Stack(Model):
    def __init__(self, residual: Residual, backend: Backend):
        self.residual = residual
        self.backend: Backend = backend
        sites = [site for site in residual.sites if isinstance(site, DepthSite)]
        self.queries = [site.pseudo_query for site in sites]
        self.key_weights = [site.key_weight for site in sites]

    def run(self, embedding: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        """The loop that `Residual` is for."""
        with use_backend(self.backend):
            state = self.residual.start(embedding)
            for site, sublayer in enumerate(sublayers):
                state = self.residual.write(state, site, sublayer(self.residual.read(state, site)))
            return self.residual.read(state, OUTPUT)
