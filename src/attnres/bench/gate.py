"""The correctness gate: no form is timed unless its value and every gradient are those of the float64 reference.

Errors are the largest difference over the largest magnitude of the exact tensor. What is allowed follows from the
dtype: in bfloat16 a rounding of the output and of each gradient; in float32 sums over the width and over the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnres.bench.forms import EPS, Form, Problem
from attnres.bench.inputs import Inputs
from attnres.ops import depth_attention

ALLOWED = {
    torch.float32: {"value": 2e-6, "gradient": 2e-5},
    torch.bfloat16: {"value": 8e-3, "gradient": 1.6e-2},
    torch.float64: {"value": 1e-13, "gradient": 1e-12},
}
"""Largest relative error of a right form, by dtype of the sources."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The worst of the comparisons, as a multiple of what is allowed there."""

    where: str
    error: float
    allowed: float

    @property
    def is_right(self) -> bool:
        """Whether the error is within what is allowed; one that is not a number is not."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        word = "right within" if self.is_right else "wrong by"
        return f"{word} {self.error:.2g} in the {self.where} (allowed {self.allowed:.2g})"


@dataclass(frozen=True, kw_only=True)
class Exact:
    """Value and gradients of one problem in float64."""

    value: Tensor
    sources: list[Tensor]
    query: Tensor
    weight: Tensor


def exact(inputs: Inputs) -> Exact:
    """The reference in float64, on inputs as they are after rounding to their dtype."""
    sources = [source.detach().double().requires_grad_() for source in inputs.sources]
    query, weight = (vector.double().requires_grad_() for vector in (inputs.query, inputs.weight))
    value = depth_attention(sources, query, weight, eps=EPS, backend="reference")
    grads = torch.autograd.grad(value, [*sources, query, weight], inputs.grad.double())
    return Exact(value=value.detach(), sources=list(grads[:-2]), query=grads[-2], weight=grads[-1])


def judge(problem: Problem, inputs: Inputs, truth: Exact) -> Verdict:
    """Compare a form's value and each of its gradients with the truth; runs it forward, and forward and backward."""
    allowed = ALLOWED[inputs.dtype]
    value = problem.value()
    verdicts = [
        _compare("value", problem.forward(), truth.value, allowed["value"]),
        _compare("value with gradients", value, truth.value, allowed["value"]),
    ]
    if not all(verdict.is_right for verdict in verdicts):  # its gradients are of something else
        return max(verdicts, key=_severity)
    grads = torch.autograd.grad(value, [*problem.sources, *problem.vectors], inputs.grad, allow_unused=True)
    for name, grad, true in _paired(problem.form, grads, inputs, truth):
        verdicts.append(_compare(f"gradient of {name}", grad, true, allowed["gradient"]))
    return max(verdicts, key=_severity)


def _paired(
    form: Form, grads: Sequence[Tensor | None], inputs: Inputs, truth: Exact
) -> list[tuple[str, Tensor | None, Tensor]]:
    """Each gradient that a form gives with its name and its true value."""
    source_grads = grads[:1] if form.packed else grads[: len(truth.sources)]
    vector_grads = grads[len(source_grads) :]
    if form.packed:
        packed = source_grads[0]
        source_grads = [None] * len(truth.sources) if packed is None else list(packed)
    names = [f"source {index}" for index in range(len(truth.sources))]
    # the gradient of a product u = q g, from that of its factor: dq = g du
    vectors = [truth.query / inputs.weight.double()] if form.folded else [truth.query, truth.weight]
    return [
        *zip(names, source_grads, truth.sources, strict=True),
        *zip(("query", "key weight"), vector_grads, vectors, strict=False),
    ]


def _compare(where: str, found: Tensor | None, true: Tensor, allowed: float) -> Verdict:
    error = float("nan")  # also what a missing gradient or another shape is worth
    if found is not None and found.shape == true.shape:
        size = true.abs().max().clamp_min(1e-3)
        error = ((found.detach().double() - true).abs().max() / size).item()
    return Verdict(where=where, error=error, allowed=allowed)


def _severity(verdict: Verdict) -> float:
    return float("inf") if verdict.error != verdict.error else verdict.error / verdict.allowed
