"""The bank: the bytes of a residual state's sources while a model runs.

Taken from the tensors themselves, by a listener, not from what a formula says; each piece of memory counts once however
many tensors share it. Sources of older states that something still holds count apart: one partial sum is to be
expected, since a model's own loop holds the state that its layer was given, and a whole bank if one were kept between
the chunks of a prompt.
"""

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from attnres.residual import History
from attnres.residual.state import storage_bytes, tensors


class Bank:
    """A listener that keeps the largest sizes, in bytes. It holds no tensor itself."""

    def __init__(self) -> None:
        self.largest = 0
        """Of the sources of a state."""
        self.largest_older = 0
        """Of the sources of older states that were still alive, beside those of the state at hand."""
        self.largest_ahead = 0
        """Of a state's results of phase 1."""
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def on_read(self, site: int, state: Any, value: Tensor) -> None:
        """Look at the state that was read."""
        del site, value
        self._look(state)

    def on_write(self, site: int, state: Any, output: Tensor) -> None:
        """Look at the state that is written to."""
        del site, output
        self._look(state)

    def _look(self, state: Any) -> None:
        sources = state.sources if isinstance(state, History) else tensors(state)
        for source in sources:
            self._seen[source] = True
        own = storage_bytes(sources)
        self.largest = max(self.largest, own)
        self.largest_older = max(self.largest_older, storage_bytes(self._seen) - own)
        if isinstance(state, History) and state.ahead is not None:
            ahead = (tensor for read in state.ahead.reads for tensor in read)
            self.largest_ahead = max(self.largest_ahead, storage_bytes(ahead))
