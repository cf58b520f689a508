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
    from attnres.analysis import comparison_table, load_comparison, render_table, write_report
    from attnres.cli.console import wide_console

    path = write_report(folder, out)
    console = wide_console()
    console.print(render_table(comparison_table(load_comparison(folder))))
    console.print(f"report: {path}", soft_wrap=True)
