"""Validation loss on windows that never change, so that every number of a run and of its rivals compares."""

import math
from collections.abc import Iterator
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from attnres.data.sampler import validation_windows
from attnres.data.shards import TokenShard
from attnres.train.batch import read_windows
from attnres.train.forward import Loss


class Evaluation(NamedTuple):
    """Result of one evaluation."""

    loss: float
    """Nats per token."""
    bits_per_byte: float
    """The same in bits per byte of text, which compares across tokenizers."""


@final
class Evaluator:
    """Evaluates a model on evenly spread windows of a split.

    Args:
        model: Put in evaluation mode for the time of an evaluation.
        loss: How it is run.
        shard: The validation split.
        context: Tokens of a window.
        sequences: Number of windows; fewer where the shard has fewer.
        batch_size: Windows read at once.
        device: Where the model is.

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
    ):
        self._model, self._loss, self._shard = model, loss, shard
        self._context, self._batch_size, self._device = context, batch_size, device
        self.starts: np.ndarray = validation_windows(len(shard), context, sequences)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets ``[B, T]``, on the model's device, in order; the last batch may be smaller."""
        for first in range(0, len(self.starts), self._batch_size):
            yield read_windows(self._shard, self.starts[first : first + self._batch_size], self._context, self._device)

    def __call__(self) -> Evaluation:
        """Mean loss over all windows."""
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad():
                total = sum(float(self._loss(*batch)) * len(batch[0]) for batch in self.batches())
        finally:
            self._model.train(was_training)
        loss = total / len(self.starts)
        return Evaluation(loss, loss / (math.log(2) * self._shard.bytes_per_token))
