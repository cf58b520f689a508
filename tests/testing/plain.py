"""A right implementation in plain PyTorch, in pieces that a broken one can replace one at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnres.testing import Adapter, Model


class Plain(Adapter):
    """Eq. 2-4, and a model that keeps its sources in a list."""

    name = "plain"
    version = "1"
    stack: type["PlainModel"]

    def prepare(self, sources: Sequence[Tensor]) -> list[Tensor]:
        if len({source.dtype for source in sources}) > 1:
            raise TypeError("sources of different dtype")
        return [source.to(torch.promote_types(source.dtype, torch.float32)) for source in sources]

    def norm(self, value: Tensor, eps: float) -> Tensor:
        return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)

    def score(self, value: Tensor, query: Tensor, weight: Tensor, eps: float) -> Tensor:
        return (self.norm(value, eps) * (weight.to(value.dtype) * query.to(value.dtype))).sum(-1)

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def values(self, values: list[Tensor], eps: float) -> list[Tensor]:
        return values

    def read(self, sources: Sequence[Tensor], query: Tensor, key_weight: Tensor | None, *, eps: float) -> Tensor:
        values = self.prepare(sources)
        weight = torch.ones_like(query) if key_weight is None else key_weight
        shares = self.weights(torch.stack([self.score(value, query, weight, eps) for value in values], -1)).split(1, -1)
        mixed = sum(share * value for share, value in zip(shares, self.values(values, eps), strict=True))
        return self.finish(mixed, sources)

    def finish(self, mixed: Tensor, sources: Sequence[Tensor]) -> Tensor:
        return mixed.to(sources[0].dtype)

    def read_many(self, sources, queries, key_weights, *, eps):
        weights = torch.ones_like(queries) if key_weights is None else key_weights
        return [self.read(sources, query, self.block_weight(weights, at), eps=eps) for at, query in enumerate(queries)]

    def phase(self, sources: Sequence[Tensor], query: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        scores = torch.stack([self.score(source, query, weight, eps) for source in sources])
        return (scores.softmax(0).unsqueeze(-1) * torch.stack(list(sources))).sum(0), scores.logsumexp(0)

    def merge(self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
        share = torch.sigmoid(one[1] - other[1]).unsqueeze(-1)
        return share * one[0] + (1 - share) * other[0]

    def block_weight(self, key_weights: Tensor, at: int) -> Tensor:
        return key_weights[at]

    def two_phase(
        self,
        finished: Sequence[Tensor],
        partials: Sequence[Tensor | None],
        queries: Tensor,
        key_weights: Tensor | None,
        *,
        eps: float,
    ) -> Sequence[Tensor]:
        assert key_weights is not None
        reads = []
        for at, partial in enumerate(partials):
            far = self.phase(finished, queries[at], self.block_weight(key_weights, at), eps)
            near = None if partial is None else self.phase([partial], queries[at], key_weights[at], eps)
            reads.append(far[0] if near is None else self.merge(far, near))
        return reads

    def model(self, num_sublayers: int, sublayers_per_block: int, dim: int, *, eps: float, dtype: torch.dtype) -> Model:
        return self.stack(self, num_sublayers, sublayers_per_block, dim, eps, dtype)


class PlainModel(Model):
    """Finished sources in a list, the partial sum beside it."""

    def __init__(self, adapter: Plain, num_sublayers: int, size: int, dim: int, eps: float, dtype: torch.dtype):
        self.adapter, self.size, self.eps, self.num_sublayers = adapter, size, eps, num_sublayers
        self.queries = [self.vector(dim, dtype, 0.0) for _ in range(num_sublayers + 1)]
        self.key_weights = [self.vector(dim, dtype, 1.0) for _ in range(num_sublayers + 1)]

    def vector(self, dim: int, dtype: torch.dtype, value: float) -> Tensor:
        return torch.full((dim,), value, dtype=dtype, requires_grad=True)

    def read(self, site: int, sources: Sequence[Tensor]) -> Tensor:
        return self.adapter.read(sources, self.queries[site], self.key_weights[site], eps=self.eps)

    def start(self, embedding: Tensor) -> tuple[list[Tensor], Tensor | None]:
        return [embedding], None

    def sources(self, finished: list[Tensor], partial: Tensor | None) -> list[Tensor]:
        return finished if partial is None else [*finished, partial]

    def add(self, partial: Tensor | None, output: Tensor) -> Tensor:
        return output if partial is None else partial + output

    def closes(self, site: int) -> bool:
        return (site + 1) % self.size == 0

    def close(self, finished: list[Tensor], partial: Tensor) -> tuple[list[Tensor], Tensor | None]:
        return [*finished, partial], None

    def output(self, finished: list[Tensor], partial: Tensor | None) -> Tensor:
        return self.read(self.num_sublayers, self.sources(finished, partial))

    def run(self, embedding: Tensor, sublayers: Sequence) -> Tensor:
        finished, partial = self.start(embedding)
        for site, sublayer in enumerate(sublayers):
            output = sublayer(self.read(site, self.sources(finished, partial)))
            partial = self.add(partial, output)
            if self.closes(site):
                finished, partial = self.close(finished, partial)
        return self.output(finished, partial)


Plain.stack = PlainModel
