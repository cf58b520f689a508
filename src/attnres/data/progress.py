"""A progress bar on stderr, for people: where stderr is not a terminal there is none."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stage(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show one stage of the work while the block runs; call what it yields with the amount just done."""
    if not sys.stderr.isatty():
        yield lambda _amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda amount: progress.advance(task, amount)
