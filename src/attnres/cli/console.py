"""Where tables are printed."""

from pathlib import Path

from rich.console import Console

from attnres.analysis import comparison_table, load_comparison, render_table, write_report, write_tables

NARROWEST = 80
"""Columns below which a table would lose some of its own."""


def wide_console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, but never too narrow for a table; in a log, wide enough for every one."""
    console = Console(stderr=stderr)
    if not console.is_terminal:
        return Console(width=160, stderr=stderr)
    return console if console.width >= NARROWEST else Console(width=NARROWEST, stderr=stderr)


def show_results(folder: Path, out: Path | None = None) -> None:
    """Write report and tables of a run or a comparison, and print the table."""
    report = write_report(folder, out)
    write_tables(folder)
    console = wide_console()
    console.print(render_table(comparison_table(load_comparison(folder))))
    console.print(f"report: {report}", soft_wrap=True)
