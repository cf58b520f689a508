"""``attnres report``: HTML report and table of a run or a comparison, from its folder alone."""

from collections.abc import Sequence
from pathlib import Path

from attnres.cli.parsing import parse


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parse(report, arguments, command="report")


def report(folder: Path, /, *, out: Path | None = None) -> None:
    """Rebuild the report of a run folder or a comparison folder, and print the table.

    Args:
        folder: Run folder, or folder of a comparison.
        out: File to write; report.html in the folder by default.
    """
    from rich.console import Console

    from attnres.analysis import comparison_table, load_comparison, render_table, write_report
    from attnres.experiments.compare import COMPARE

    path = write_report(folder, out)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    if (folder / COMPARE).is_file():
        console.print(render_table(comparison_table(load_comparison(folder))))
    console.print(f"report: {path}", soft_wrap=True)
