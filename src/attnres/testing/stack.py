"""Whole models under the checks: built in a given depth and block size, run with sublayers that are watched."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from attnres.testing import definition
from attnres.testing.adapter import Adapter, Model, NotApplicable
from attnres.testing.definition import Sublayer
from attnres.testing.inputs import EPS, normals

CASES = [(6, 2), (6, 1), (5, 3), (4, 8), (4, 4), (13, 4), (40, 1), (60, 2), (26, 24), (186, 24)]
"""Sublayers and sublayers per block: whole blocks, Full, a short last block, one block, many sources, the depth of Kimi
K3."""
SMALL = [(6, 2), (6, 1), (5, 3), (4, 8), (4, 4)]
"""Those that are quick to run with sublayers that compute something."""
Kind = Literal["queries", "key_weights"]
LOUD = 1000.0
"""Size of the ledger's embedding."""


@final
@dataclass(frozen=True)
class Trace:
    """What happened in one run of a model."""

    reads: list[Tensor]
    """What each sublayer was given."""
    outputs: list[Tensor]
    """What each sublayer returned, the tensors themselves."""
    originals: list[Tensor]
    """Copies of them, made when they were returned."""
    result: Tensor
    """The output read."""

    @property
    def all_reads(self) -> list[Tensor]:
        """One per site, the output read last."""
        return [*self.reads, self.result]


@final
class Stack:
    """A model of the implementation with its case, and the vectors that the definition is given."""

    def __init__(
        self,
        adapter: Adapter,
        num_sublayers: int,
        sublayers_per_block: int,
        dim: int,
        *,
        dtype: torch.dtype | None = None,
    ):
        if num_sublayers > adapter.max_sublayers:
            raise NotApplicable(f"declared: at most {adapter.max_sublayers} sublayers")
        width = 1 << (dim - 1).bit_length() if adapter.power_of_two_width else dim
        self.adapter, self.num_sublayers, self.sublayers_per_block = adapter, num_sublayers, sublayers_per_block
        self.dim, self.eps, self.dtype = width, adapter.fixed_eps or EPS, dtype or adapter.precise
        if adapter.is_interpreted and self.dtype == torch.bfloat16:
            raise NotApplicable("Triton's interpreter has no bfloat16 arithmetic; needs a GPU")
        self.model: Model = adapter.model(num_sublayers, sublayers_per_block, width, eps=self.eps, dtype=self.dtype)

    @property
    def case(self) -> str:
        """The case in words."""
        return f"{self.num_sublayers} sublayers, {self.sublayers_per_block} per block"

    def randomise(self, seed: int, loudness: float = 1.0) -> None:
        """Give each site a query and a key weight of its own."""
        normal = normals(seed, self.adapter.device)
        size = loudness * self.dim**-0.5 / self.adapter.definition.scale(self.dim)
        for site in range(len(self.model.queries)):
            self.fill("queries", site, normal(self.dim) * size)
        for site in range(len(self.model.key_weights)):
            self.fill("key_weights", site, 1 + 0.3 * normal(self.dim))

    def zero_queries(self) -> None:
        """Make every read a mean."""
        for site in range(len(self.model.queries)):
            self.fill("queries", site, torch.zeros(self.dim, device=self.adapter.device))

    def fill(self, kind: Kind, site: int, value: Tensor) -> None:
        """Write to a parameter, whichever shape it keeps its numbers in.

        Raises:
            RuntimeError: It is no parameter of the model: the graph says so, or the numbers are not there afterwards.
        """
        vector = getattr(self.model, kind)[site]
        if vector is None:
            return
        root_of(vector)
        vector.data.copy_(value.reshape(vector.shape))  # a view of packed parameters may be written to no other way
        kept = getattr(self.model, kind)[site]  # which a property makes anew
        if kept is not vector and not torch.equal(kept, vector):
            raise RuntimeError(f"{kind} are not the model's parameters, or views of them: what is written to is lost")

    def run(self, embedding: Tensor, sublayers: Sequence[Sublayer]) -> Trace:
        """Run the model; it has to call each sublayer once and in order."""
        reads, outputs, originals = [], [], []

        def watched(at: int) -> Sublayer:
            def call(read: Tensor) -> Tensor:
                if at != len(reads):
                    raise RuntimeError(f"sublayer {at} is called after {len(reads)} others")
                reads.append(read)
                outputs.append(sublayers[at](read))
                originals.append(outputs[-1].detach().clone())
                return outputs[-1]

            return call

        result = self.model.run(embedding, [watched(at) for at in range(self.num_sublayers)])
        if len(reads) != self.num_sublayers:
            raise RuntimeError(f"{len(reads)} of {self.num_sublayers} sublayers are called")
        return Trace(reads, outputs, originals, result)

    def exact(self, embedding: Tensor, sublayers: Sequence[Sublayer]) -> list[Tensor]:
        """All reads by the definition, with the model's queries and key weights as they are now."""
        return definition.run(
            self.adapter.definition, embedding, sublayers, self.exact_queries(), self.exact_weights(),
            sublayers_per_block=self.sublayers_per_block, eps=self.eps,
        )  # fmt: skip

    def exact_queries(self) -> list[Tensor]:
        """Queries as the definition takes them; one that the model lacks is zero."""
        zero = torch.zeros(self.dim, dtype=torch.float64, device=self.adapter.device)
        return [zero if query is None else flat(query) for query in self._padded(self.model.queries)]

    def exact_weights(self) -> list[Tensor | None]:
        """Key weights likewise; one that the model lacks is one."""
        return [None if weight is None else flat(weight) for weight in self._padded(self.model.key_weights)]

    def _padded(self, vectors: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [*vectors, *[None] * (self.num_sublayers + 1 - len(vectors))]

    def embedding(self, seed: int, tokens: int = 3, batch: int = 1) -> Tensor:
        """A random embedding."""
        return normals(seed, self.adapter.device)(batch, tokens, self.dim).to(self.dtype)

    def given(self, trace: Trace) -> list[Sublayer]:
        """Sublayers that return what they did in a run, so that each read is judged by itself."""
        return [lambda _, one=one: one.double() for one in trace.originals]

    def ledger(self) -> tuple[Tensor, list[Sublayer]]:
        """An embedding and sublayers that are constant one-hot vectors, so that each read says what it is made of."""
        unit = torch.eye(self.dim, dtype=self.dtype, device=self.adapter.device)
        embedding = (unit[self.num_sublayers] * LOUD).expand(1, 1, self.dim).clone()
        return embedding, [_constant(unit[at]) for at in range(self.num_sublayers)]

    def linear(self, seed: int) -> list[Sublayer]:
        """Sublayers that are random linear maps, in the dtype of what they are given."""
        normal = normals(seed, self.adapter.device)
        matrices = [normal(self.dim, self.dim) * self.dim**-0.5 for _ in range(self.num_sublayers)]
        return [_linear(matrix) for matrix in matrices]


def gradients(loss: Tensor, vectors: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients of parameters, or of views of parameters: those of the parameters, seen through the same views.

    Raises:
        RuntimeError: One is neither, so that nothing can be said of its gradient.
    """
    roots = [root_of(vector) for vector in vectors]
    distinct = list({id(root): root for root in roots}.values())
    found = torch.autograd.grad(loss, distinct, allow_unused=True)
    by_root = dict(zip(map(id, distinct), found, strict=True))
    return [_part(by_root[id(root)], root, vector) for root, vector in zip(roots, vectors, strict=True)]


def root_of(vector: Tensor) -> Tensor:
    """The parameter that a parameter is, or is a view of.

    Raises:
        RuntimeError: It is neither.
    """
    root = vector if vector.is_leaf or vector._base is None else vector._base
    if not root.is_leaf:
        raise RuntimeError("queries and key weights are neither leaf tensors (parameters) nor views of leaf tensors")
    return root


def _part(gradient: Tensor | None, root: Tensor, vector: Tensor) -> Tensor | None:
    if gradient is None or root is vector:
        return gradient
    whole = torch.empty_strided(root.shape, root.stride(), dtype=gradient.dtype, device=gradient.device)
    offset = vector.storage_offset() - root.storage_offset()
    return whole.copy_(gradient).as_strided(vector.shape, vector.stride(), offset)


def flat(vector: Tensor) -> Tensor:
    """A parameter's numbers, as the definition takes them."""
    return vector.detach().double().flatten()


def _constant(row: Tensor) -> Sublayer:
    # the value must not depend on what is read, but has to follow its shape, dtype and graph
    return lambda read: torch.zeros_like(read) + row.to(read.dtype)


def _linear(matrix: Tensor) -> Sublayer:
    return lambda read: read @ matrix.to(read.dtype)
