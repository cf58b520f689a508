"""One forward pass to a loss, and the gradient of one optimizer step.

The loss is always the mean over all tokens of the step in float32, whatever the pass was computed in, so that a step in
several passes is the step in one to rounding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.train.config import TrainConfig
from attnres.train.runtime import autocast

Loss = Callable[[Tensor, Tensor], Tensor]
"""Inputs and targets ``[B, T]`` -> mean cross-entropy in nats per token, float32."""


def build_eval_loss(model: nn.Module, train: TrainConfig) -> Loss:
    """The loss of an evaluation, which may have a precision of its own."""
    return build_loss(model, train if train.eval_precision is None else replace(train, precision=train.eval_precision))


def build_loss(model: nn.Module, train: TrainConfig) -> Loss:
    """The loss of a model under the precision and compilation of a resolved config."""
    return loss_of(torch.compile(model, dynamic=False) if train.compile else model, train)


def loss_of(forward: Callable[..., Any], train: TrainConfig) -> Loss:
    """The loss of something that is called like a model, under the precision of a resolved config."""

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast(train):
            logits = forward(input_ids=inputs, use_cache=False).logits
        return cross_entropy(logits, targets)

    return loss


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens in nats, float32, of logits ``[B, T, vocabulary]`` and targets ``[B, T]``."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


class Passes(Protocol):
    """Runs the passes of an optimizer step, on one process or on many."""

    def accumulate(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Add the gradient of the mean loss over all passes and processes to what is there; return that loss."""
        ...

    def clip(self, bound: float) -> Tensor:
        """Scale all gradients down to a norm of at most ``bound`` together; return their norm before."""
        ...


class StepNumbers(NamedTuple):
    """What one optimizer step was made of."""

    loss: float
    """Nats per token, mean over all tokens of the step."""
    grad_norm: float
    """Norm of all gradients together, before clipping."""

    @property
    def finite(self) -> bool:
        """Whether the step may be applied."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def backward(passes: Passes, batches: Sequence[tuple[Tensor, Tensor]], *, grad_clip: float | None) -> StepNumbers:
    """Accumulate the gradient of the mean loss over equal batches, and clip it.

    Args:
        passes: How they are run.
        batches: Inputs and targets of each pass; all of the same shape.
        grad_clip: Largest norm of all gradients together; None leaves them as they are.
    """
    total = passes.accumulate(batches)
    norm = passes.clip(math.inf if grad_clip is None else grad_clip)
    return StepNumbers(float(total), float(norm))
