"""Metrics to TensorBoard event files in the run folder."""

from pathlib import Path
from typing import Any, final

from attnres.errors import BackendUnavailableError


@final
class TensorBoardTracker:
    """Writes ``tensorboard/`` in the run folder; steps that are repeated after a resume are purged.

    Raises:
        BackendUnavailableError: TensorBoard is not installed.
    """

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise BackendUnavailableError(
                "tracker 'tensorboard' needs TensorBoard: pip install 'attnres[tensorboard]'"
            ) from error
        self._writer_class = SummaryWriter

    def start(self, folder: Path, config: dict[str, Any], *, step: int | None) -> None:
        """Open an event file."""
        del config
        purge = 0 if step is None else step + 1
        self._writer = self._writer_class(str(folder / "tensorboard"), purge_step=purge)

    def log(self, row: dict[str, Any]) -> None:
        """Write every number of a row as ``kind/name``."""
        for name, value in row.items():
            if name not in ("kind", "step"):
                self._writer.add_scalar(f"{row['kind']}/{name}", value, row["step"])

    def flush(self) -> None:
        """Hand pending events to the system."""
        self._writer.flush()

    def finish(self, result: dict[str, Any] | None) -> None:
        """Close the event file."""
        del result
        self._writer.close()
