"""What a person sees of a running run: a live bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from typing import Any, Protocol, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

PLAIN_SECONDS = 10.0
"""Least time between two plain lines."""


class Display(Protocol):
    """Shows how far a run is."""

    def start(self, step: int) -> None:
        """Begin at a number of steps done."""

    def update(self, row: dict[str, Any]) -> None:
        """Show a row of metrics."""

    def stop(self) -> None:
        """Leave the terminal tidy."""


def build_display(label: str, steps: int, *, enabled: bool) -> Display:
    """A display for this process's standard error.

    Args:
        label: Name of the run.
        steps: Optimizer steps of the whole run.
        enabled: Whether to show anything.
    """
    if not enabled:
        return SilentDisplay()
    console = Console(stderr=True)
    return RichDisplay(label, steps, console) if console.is_terminal else PlainDisplay(label, steps)


@final
class SilentDisplay:
    """Shows nothing."""

    def start(self, step: int) -> None:
        """Nothing."""

    def update(self, row: dict[str, Any]) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


@final
class RichDisplay:
    """A bar with losses, tokens per second and time left."""

    def __init__(self, label: str, steps: int, console: Console):
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(steps)) + 1)),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
        )
        self._task = self._progress.add_task(label, total=steps, numbers="", start=False)
        self._numbers = Numbers()

    def start(self, step: int) -> None:
        """Show the bar."""
        self._progress.start()
        self._progress.update(self._task, completed=step)
        self._progress.start_task(self._task)

    def update(self, row: dict[str, Any]) -> None:
        """Move the bar and change its numbers."""
        self._numbers.take(row)
        self._progress.update(self._task, completed=row["step"], numbers=str(self._numbers))

    def stop(self) -> None:
        """Leave the last state of the bar on the terminal."""
        self._progress.stop()


@final
class PlainDisplay:
    """A line every few seconds and at each evaluation, for logs."""

    def __init__(self, label: str, steps: int):
        self._label, self._steps = label, steps
        self._numbers = Numbers()
        self._last = float("-inf")

    def start(self, step: int) -> None:
        """Note where the run begins, for the time left."""
        self._first, self._began = step, time.monotonic()

    def update(self, row: dict[str, Any]) -> None:
        """Print a line if the last one is long ago, or after an evaluation."""
        self._numbers.take(row)
        now = time.monotonic()
        if row["kind"] == "train" and now - self._last < PLAIN_SECONDS:
            return
        self._last = now
        left = self._time_left(row["step"], now)
        print(f"{self._label}: step {row['step']}/{self._steps} {self._numbers}{left}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Nothing is open."""

    def _time_left(self, step: int, now: float) -> str:
        if step <= self._first or step >= self._steps:
            return ""
        seconds = round((now - self._began) / (step - self._first) * (self._steps - step))
        return f" {seconds // 60}:{seconds % 60:02d} left"


class Numbers:
    """The latest numbers of a run, as one short text; a validation loss of an earlier step has that step with it."""

    def __init__(self) -> None:
        self._train: dict[str, Any] = {}
        self._valid: dict[str, Any] = {}

    def take(self, row: dict[str, Any]) -> None:
        """Remember a row of metrics."""
        if row["kind"] == "train":
            self._train = row
        else:
            self._valid = row

    def __str__(self) -> str:
        parts: list[str] = []
        if self._train:
            parts.append(f"loss {self._train['loss']:.3f}")
        if self._valid:
            step = self._valid["step"]
            is_older = bool(self._train) and self._train["step"] != step
            parts.append(f"valid {self._valid['loss']:.3f}" + (f" (step {step})" if is_older else ""))
        if self._train:
            parts.append(f"{self._train['tokens_per_second']:,.0f} tokens/s")
        return " ".join(parts)
