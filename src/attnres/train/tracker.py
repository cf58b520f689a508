"""Where metrics go: always a JSONL file, and other places beside it.

The file is the record that everything else is rebuilt from, so it obeys the checkpoint: on resume, lines of steps that
are going to be repeated are dropped, and no line is missing or doubled.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, final

from attnres.errors import DataError
from attnres.train.files import replace_text
from attnres.train.folder import METRICS

Row = dict[str, Any]
"""One line of metrics: ``kind`` is ``"train"`` or ``"valid"``, ``step`` the optimizer steps done."""


class Tracker(Protocol):
    """Receives the metrics of a run as they come."""

    def start(self, folder: Path, config: dict[str, Any], *, step: int | None) -> None:
        """Get ready; metrics after ``step`` are going to be repeated (None: all)."""

    def log(self, row: Row) -> None:
        """Take one row."""

    def flush(self) -> None:
        """Make sure that rows so far survive a crash; called before each checkpoint."""

    def finish(self, result: Row | None) -> None:
        """Close; ``result`` is None when the run stopped early."""


@final
class JsonlTracker:
    """Writes ``metrics.jsonl``, one JSON object per line, each handed to the system at once."""

    def start(self, folder: Path, config: dict[str, Any], *, step: int | None) -> None:
        """Drop lines after ``step`` and open the file for appending."""
        del config
        path = folder / METRICS
        rewind_metrics(path, step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, row: Row) -> None:
        """Append one line."""
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def flush(self) -> None:
        """Flush the file to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, result: Row | None) -> None:
        """Close the file."""
        del result
        self._file.close()


def read_metrics(folder: Path | str) -> list[Row]:
    """Rows of a run folder's ``metrics.jsonl``; a last line that a kill cut short is left out.

    Raises:
        DataError: A line before the last is not a JSON object with a step.
    """
    path = Path(folder) / METRICS
    return [json.loads(line) for line in _whole_lines(path)] if path.exists() else []


def rewind_metrics(path: Path, step: int | None) -> None:
    """Drop the lines of later steps than ``step`` (None: all lines), in one step; earlier lines keep their bytes."""
    if path.exists():
        kept = [line for line in _whole_lines(path) if step is not None and json.loads(line)["step"] <= step]
        replace_text(path, "".join(f"{line}\n" for line in kept))


def _whole_lines(path: Path) -> list[str]:
    *lines, unfinished = path.read_text(encoding="utf-8").split("\n")
    del unfinished  # empty, unless the process was killed within a write
    for number, line in enumerate(lines, start=1):
        try:
            json.loads(line)["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged: line {number} is no row of metrics ({error!r})") from error
    return lines


def build_trackers(names: Sequence[str]) -> list[Tracker]:
    """Trackers beside the JSONL file, by name.

    Raises:
        BackendUnavailableError: The library of one is not installed.
    """
    trackers: list[Tracker] = []
    for name in names:
        if name == "tensorboard":
            from attnres.train.tracker_tensorboard import TensorBoardTracker

            trackers.append(TensorBoardTracker())
        if name == "wandb":
            from attnres.train.tracker_wandb import WandbTracker

            trackers.append(WandbTracker())
    return trackers
