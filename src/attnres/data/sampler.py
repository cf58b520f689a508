"""Which windows of a shard form batch number ``step``: a pure function of the seed and the step.

Nothing is drawn as training goes along, so there is no random state to lose: a resumed run, a run on other hardware
and another arm of a comparison see the same tokens in the same order. All randomness comes from the raw output of
numpy's Philox generator, which numpy promises never to change (its shuffles carry no such promise).
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import final

import numpy as np

from attnres.errors import ConfigError, DataError


@final
class Sampler:
    """Batches of window starts, forever.

    A window at ``s`` has inputs ``tokens[s : s + context]`` and targets one token further. An epoch goes once through
    windows that lie end to end, in an order and from an offset of its own; epochs follow each other without a gap, so
    every batch is full and one may hold windows of two epochs.

    The offset moves the windows by up to a context, and so costs an epoch at most one window of the shard.

    Args:
        num_tokens: Length of the shard.
        context: Tokens of a window.
        batch_size: Windows of a batch.
        seed: Any non-negative integer; decides all orders and offsets.

    Raises:
        ConfigError: An argument is out of range.
        DataError: The context is longer than the shard.
    """

    def __init__(self, num_tokens: int, *, context: int, batch_size: int, seed: int) -> None:
        check_context(num_tokens, context)
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; allowed: 1 or more")
        if seed < 0:
            raise ConfigError(f"seed is {seed}; allowed: 0 or more")
        self.num_tokens, self.context, self.batch_size, self.seed = num_tokens, context, batch_size, seed
        self.step = 0

    @property
    def windows_per_epoch(self) -> int:
        """Windows of an epoch, the same for every epoch."""
        return _windows_per_epoch(self.num_tokens, self.context)

    def epoch(self, step: int) -> int:
        """Epoch of the first window of a batch, counted from 0."""
        return step * self.batch_size // self.windows_per_epoch

    def batch(self, step: int) -> np.ndarray:
        """Window starts of batch ``step``, int64 ``[batch_size]``; depends on nothing that was drawn before."""
        if step < 0:
            raise ConfigError(f"step is {step}; allowed: 0 or more")
        position = step * self.batch_size
        starts = np.empty(self.batch_size, np.int64)
        filled = 0
        while filled < self.batch_size:
            epoch, index = divmod(position + filled, self.windows_per_epoch)
            taken = _epoch_starts(self.num_tokens, self.context, self.seed, epoch)[
                index : index + self.batch_size - filled
            ]
            starts[filled : filled + len(taken)] = taken
            filled += len(taken)
        return starts

    def next_batch(self) -> np.ndarray:
        """Return the batch at the sampler's position and advance by one step."""
        starts = self.batch(self.step)
        self.step += 1
        return starts

    def state_dict(self) -> dict[str, int]:
        """Position, and the settings that give it a meaning; plain integers, fit for JSON."""
        return {**self._settings(), "step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a saved position.

        Raises:
            ConfigError: The state lacks an entry, or its settings differ: the position would mean other data.
        """
        for name, here in {**self._settings(), "step": 0}.items():
            if name not in state:
                raise ConfigError(f"sampler state lacks {name}; it has {', '.join(state) or 'nothing'}")
            if name != "step" and state[name] != here:
                raise ConfigError(
                    f"sampler state has {name}={state[name]}, but this run has {name}={here}; they must agree"
                )
        if state["step"] < 0:
            raise ConfigError(f"sampler state has step={state['step']}; allowed: 0 or more")
        self.step = state["step"]

    def _settings(self) -> dict[str, int]:
        return {
            "num_tokens": self.num_tokens,
            "context": self.context,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }


def validation_windows(num_tokens: int, context: int, limit: int | None = None) -> np.ndarray:
    """Window starts for an evaluation, int64, ascending and not overlapping.

    Args:
        num_tokens: Length of the shard.
        context: Tokens of a window.
        limit: At most this many, spread evenly over the shard so that a short evaluation is not one of its first pages;
            ``None`` means all. A tail shorter than a window is left out.

    Raises:
        ConfigError: ``limit`` is below 1.
        DataError: The context is longer than the shard.
    """
    check_context(num_tokens, context)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit of validation windows is {limit}; allowed: 1 or more, or None for all")
    available = (num_tokens - 1) // context
    count = available if limit is None else min(limit, available)
    return np.arange(count, dtype=np.int64) * available // count * context


def check_context(num_tokens: int, context: int) -> None:
    """Raise unless a window and the target of its last token fit the shard."""
    if context < 1:
        raise ConfigError(f"context is {context} tokens; allowed: 1 or more")
    if context >= num_tokens:
        raise DataError(
            f"context is {context} tokens, but the shard has {num_tokens}; allowed: at most {num_tokens - 1}"
        )


def _windows_per_epoch(num_tokens: int, context: int) -> int:
    """Windows that fit from every offset below ``context``; a shard of less than two windows gives one."""
    return max(1, (num_tokens - context) // context)


@lru_cache(maxsize=4)
def _epoch_starts(num_tokens: int, context: int, seed: int, epoch: int) -> np.ndarray:
    windows = _windows_per_epoch(num_tokens, context)
    offsets = min(context, num_tokens - windows * context)
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(windows + 1)
    order = np.argsort(bits[1:], kind="stable")
    starts = int(bits[0]) % offsets + order.astype(np.int64) * context
    starts.flags.writeable = False
    return starts
