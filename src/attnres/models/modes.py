"""Evaluation or training mode for a while, without forgetting which modules were in which mode."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, and each module's own mode back afterwards."""
    with _in_mode(model, training=False):
        yield


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Training mode inside, and each module's own mode back afterwards."""
    with _in_mode(model, training=True):
        yield


@contextmanager
def _in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training
