"""One forward pass to a loss, and the gradient of one optimizer step.

The loss is always the mean over all tokens of the step in float32, whatever the pass was computed in, so that a step in
several passes is the step in one to rounding.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

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
    forward = torch.compile(model, dynamic=False) if train.compile else model

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast(train):
            logits = forward(input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())

    return loss


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


def backward(
    loss: Loss,
    batches: Sequence[tuple[Tensor, Tensor]],
    parameters: Iterable[nn.Parameter],
    *,
    grad_clip: float | None,
) -> StepNumbers:
    """Accumulate the gradient of the mean loss over equal batches, and clip it.

    Args:
        loss: What to minimise.
        batches: Inputs and targets of each pass; all of the same shape.
        parameters: Whose gradients are measured and clipped.
        grad_clip: Largest norm of all gradients together; None leaves them as they are.
    """
    total = 0.0
    for inputs, targets in batches:
        value = loss(inputs, targets) / len(batches)
        value.backward()
        total = total + value.detach()
    bound = math.inf if grad_clip is None else grad_clip
    norm = torch.nn.utils.clip_grad_norm_(parameters, bound)
    return StepNumbers(float(total), float(norm))
