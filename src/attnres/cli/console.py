"""Where tables are printed."""

from pathlib import Path

from rich.console import Console

from attnres.analysis import comparison_table, load_comparison, render_table, write_report, write_tables


def wide_console() -> Console:
    """A console as wide as the terminal, or wide enough for every table where there is none, as in a pipe or a log."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def show_results(folder: Path, out: Path | None = None) -> None:
    """Write report and tables of a run or a comparison, and print the table."""
    report = write_report(folder, out)
    write_tables(folder)
    console = wide_console()
    console.print(render_table(comparison_table(load_comparison(folder))))
    console.print(f"report: {report}", soft_wrap=True)
