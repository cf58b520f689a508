"""Hooks into a run, for whatever is no business of the loop.

A callback is told what happened and may keep a state of its own, which is part of every checkpoint. It must leave the
model, the gradients of a step and the random generators as it finds them, or the run is no longer the one its config
says. On a mesh only rank 0 has callbacks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from attnres.train.config import RunConfig
from attnres.train.evaluation import Evaluator


@dataclass(frozen=True, kw_only=True, eq=False)
class RunContext:
    """What a callback is shown of a run."""

    model: nn.Module
    """The model itself, never the compiled one; on a mesh this rank's part of it, the first where it has several."""
    config: RunConfig
    """Resolved settings."""
    folder: Path
    """The run folder."""
    evaluator: Evaluator
    """Evaluates the model, and hands out the validation windows."""
    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens trained on."""
    metrics: dict[str, Any]
    """The latest row of metrics; empty at the start."""
    whole_model: Callable[[], nn.Module]
    """Gives the model with all its weights on this process: itself, or on a mesh one made anew, as it was in the newest
    checkpoint (at the end, that of the last step)."""


class Callback(Protocol):
    """What the loop calls. Inherit from it to write only the hooks that are needed; the others do nothing."""

    def on_start(self, context: RunContext) -> None:
        """Before the first step, and after a checkpoint was restored."""

    def on_step_end(self, context: RunContext) -> None:
        """After each optimizer step."""

    def on_evaluate(self, context: RunContext) -> None:
        """After each evaluation; the model is in training mode again."""

    def on_checkpoint(self, context: RunContext, path: Path) -> None:
        """After a checkpoint is whole."""

    def on_end(self, context: RunContext, result: dict[str, Any]) -> None:
        """After the last step, evaluation and checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """State to save with a checkpoint, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""


def callback_states(callbacks: "tuple[Callback, ...]") -> dict[str, Any]:
    """States of all callbacks, keyed by position and class name."""
    return {key: callback.state_dict() for key, callback in _keyed(callbacks)}


def restore_callbacks(callbacks: "tuple[Callback, ...]", states: dict[str, Any]) -> None:
    """Hand each callback its saved state; one that was not there before starts fresh."""
    for key, callback in _keyed(callbacks):
        if key in states:
            callback.load_state_dict(states[key])


def _keyed(callbacks: "tuple[Callback, ...]") -> list[tuple[str, Callback]]:
    return [(f"{index}-{type(callback).__name__}", callback) for index, callback in enumerate(callbacks)]
