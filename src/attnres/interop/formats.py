"""What a format of other people's checkpoints is, to `attnres.interop.checkpoints`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from attnres.interop.folder import CheckpointFolder
from attnres.interop.own import Own
from attnres.interop.stored import StoredTensor


@final
@dataclass(frozen=True, kw_only=True)
class Translated:
    """What is to be written: a config, and tensors whose bytes lie in the folder that was read."""

    config: Mapping[str, Any]
    """The new ``config.json``."""
    tensors: list[StoredTensor]
    """Every tensor of the new folder."""


class Format(ABC):
    """A way of naming and storing a model with attention residuals."""

    kind: ClassVar[str]
    """The word for it."""

    @abstractmethod
    def recognizes(self, config: Mapping[str, Any]) -> bool:
        """Whether a config is of this format."""

    @abstractmethod
    def to_ours(self, folder: CheckpointFolder, *, text_only: bool) -> Translated:
        """A folder of this format as one of ours.

        Raises:
            CheckpointError: Config and tensors do not fit each other, or have no counterpart here.
        """

    @abstractmethod
    def from_ours(self, own: Own) -> Translated:
        """The inverse of `to_ours`.

        Raises:
            CheckpointError: The model has no counterpart in this format.
        """
