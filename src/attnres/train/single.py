"""A run on one process: the model as it is."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn

from attnres.optim import build_optimizer
from attnres.train.checkpoint import Checkpoint, Checkpoints
from attnres.train.config import RunConfig
from attnres.train.evaluation import WholeShare
from attnres.train.forward import Loss, build_eval_loss, build_loss
from attnres.train.random_state import random_state, restore_random_state, seed_everything
from attnres.train.weights import load_model_tensors, load_weights, model_tensors

T = TypeVar("T")


@final
class SingleProcess:
    """What the loop needs of a model that one process trains.

    Args:
        model: Moved to the run's device.
        config: Resolved settings.
    """

    is_first = True

    def __init__(self, model: nn.Module, config: RunConfig):
        self.model, self.config = model.to(config.train.device), config
        self.optimizer = build_optimizer(model, config.optim)
        self.loss: Loss = build_loss(model, config.train)
        self.eval_loss: Loss = (
            self.loss if config.train.eval_precision is None else build_eval_loss(model, config.train)
        )
        self.share = WholeShare()
        self.sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self.evaluated: nn.Module = model

    def agreed(self) -> AbstractContextManager[object]:
        """There is nobody to agree with."""
        return nullcontext()

    def from_first(self, make: Callable[[], T]) -> T:
        """What ``make`` makes."""
        return make()

    def rows(self, starts: np.ndarray) -> np.ndarray:
        """The windows of a pass that this process reads: all."""
        return starts

    def accumulate(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """See `attnres.train.forward.Passes`."""
        total: Any = 0.0
        for inputs, targets in batches:
            value = self.loss(inputs, targets) / len(batches)
            value.backward()
            total = total + value.detach()
        return total

    def clip(self, bound: float) -> Tensor:
        """See `attnres.train.forward.Passes`."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), bound)

    def rest(self) -> None:
        """Nothing is held after an evaluation."""

    def start(self) -> None:
        """Put weights and random generators where a new run starts."""
        if self.config.train.init_from is not None:
            load_weights(self.model, self.config.train.init_from, may_lack_depth=True)
        seed_everything(self.config.train.seed)

    def newest(self, checkpoints: Checkpoints, *, fallback: bool) -> Checkpoint | None:
        """Read the newest checkpoint."""
        return checkpoints.newest(fallback=fallback)

    def load(self, checkpoint: Checkpoint) -> None:
        """Put weights and optimizer where they were."""
        load_model_tensors(self.model, checkpoint.model, source=checkpoint.path)
        self.optimizer.load_state_dict(checkpoint.optimizer)

    def restore_random_state(self, state: Mapping[str, Any]) -> None:
        """Put the random generators where they were."""
        restore_random_state(state["random"])

    def random_state(self) -> dict[str, Any]:
        """Entries of a checkpoint's state for the random generators."""
        return {"random": random_state()}

    def save(self, checkpoints: Checkpoints, state: dict[str, Any]) -> Path:
        """Write a checkpoint."""
        return checkpoints.save(model=model_tensors(self.model), optimizer=self.optimizer.state_dict(), state=state)
