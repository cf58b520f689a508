"""``attnres report``: HTML report and table of a run or a comparison, from its folder alone."""

from collections.abc import Sequence
from pathlib import Path

from attnres.cli.console import show_results
from attnres.cli.parsing import parse
from attnres.train import load_run_config


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parse(report, arguments, command="report")


def report(folder: Path, /, *, out: Path | None = None) -> None:
    """Rebuild the report and the tables of a run folder or a comparison folder, and print the table.

    Args:
        folder: Run folder, or folder of a comparison.
        out: File to write; report.html in the folder by default.
    """
    if (folder / "config.json").is_file():  # a run, and not a model
        load_run_config(folder)
    show_results(folder, out)
