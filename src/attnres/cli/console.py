"""Where tables are printed."""

from rich.console import Console


def wide_console() -> Console:
    """A console as wide as the terminal, or wide enough for every table where there is none, as in a pipe or a log."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
