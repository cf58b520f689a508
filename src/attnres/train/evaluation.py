"""Validation loss on windows that never change, so that every number of a run and of its rivals compares."""

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol, final

import numpy as np
import torch
from torch import Tensor, nn

from attnres.data.sampler import validation_windows
from attnres.data.shards import TokenShard
from attnres.models.modes import evaluating
from attnres.train.batch import read_windows
from attnres.train.forward import Loss


class Evaluation(NamedTuple):
    """Result of one evaluation."""

    loss: float
    """Nats per token."""
    bits_per_byte: float
    """The same in bits per byte of text, which compares across tokenizers."""


class Share(Protocol):
    """Which windows of a batch this process reads, and the sum over all processes."""

    def windows(self, starts: np.ndarray) -> tuple[np.ndarray, int]:
        """Windows to read of a batch, at least one, and how many of them count."""
        ...

    def total(self, value: float) -> float:
        """Sum of a number over all processes that read other windows."""
        ...


@final
class WholeShare:
    """Of a process that reads all windows."""

    def windows(self, starts: np.ndarray) -> tuple[np.ndarray, int]:
        """All of them."""
        return starts, len(starts)

    def total(self, value: float) -> float:
        """The number."""
        return value


@final
class Evaluator:
    """Evaluates a model on evenly spread windows of a split.

    Args:
        model: Put in evaluation mode for the time of an evaluation; each of its modules has its own mode back then.
        loss: How it is run.
        shard: The validation split.
        context: Tokens of a window.
        sequences: Number of windows; fewer where the shard has fewer.
        batch_size: Windows read at once.
        device: Where the model is.
        share: What this process reads, where several evaluate together; all of them have to.

    Raises:
        DataError: The context is longer than the shard.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        shard: TokenShard,
        *,
        context: int,
        sequences: int,
        batch_size: int,
        device: str,
        share: Share | None = None,
    ):
        self._model, self._loss, self._shard = model, loss, shard
        self._context, self._batch_size, self._device = context, batch_size, device
        self._share = share or WholeShare()
        self.starts: np.ndarray = validation_windows(len(shard), context, sequences)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets ``[B, T]``, on the model's device, in order; the last batch may be smaller."""
        for starts in self._batches_of_starts():
            yield self._read(starts)

    def __call__(self) -> Evaluation:
        """Mean loss over all windows."""
        with evaluating(self._model), torch.no_grad():
            total = sum(self._loss_of(starts) for starts in self._batches_of_starts())
        loss = self._share.total(total) / len(self.starts)
        return Evaluation(loss, loss / (math.log(2) * self._shard.bytes_per_token))

    def _batches_of_starts(self) -> Iterator[np.ndarray]:
        for first in range(0, len(self.starts), self._batch_size):
            yield self.starts[first : first + self._batch_size]

    def _loss_of(self, starts: np.ndarray) -> float:
        """Sum of the losses of this process's windows of a batch."""
        own, count = self._share.windows(starts)
        return float(self._loss(*self._read(own))) * count

    def _read(self, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        return read_windows(self._shard, starts, self._context, self._device)
