"""``attnres export``: a model of ours as a checkpoint of another project."""

from collections.abc import Sequence
from typing import Literal

from attnres.cli.conversion import Destination, Source
from attnres.cli.parsing import parse


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parse(export_command, arguments, command="export")


def export_command(
    source: Source, destination: Destination, /, *, kind: Literal["auto", "kimi-k3", "fla", "inkling2"] = "auto"
) -> None:
    """Make a checkpoint in the format of another project from a folder of ours; byte for byte.

    Args:
        source: Folder of ours.
        destination: Folder to make.
        kind: Format of the destination; that from which the source was imported by default.
    """
    from attnres.interop import export_checkpoint

    format = export_checkpoint(source, destination, kind=kind)
    print(f"{destination}: exported to {format}")
