"""``attnres import``: a checkpoint of another project as one of ours."""

from collections.abc import Sequence
from typing import Literal

from attnres.cli.conversion import Destination, Source
from attnres.cli.parsing import parse


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parse(import_command, arguments, command="import")


def import_command(
    source: Source,
    destination: Destination,
    /,
    *,
    kind: Literal["auto", "kimi-k3", "fla", "inkling2"] = "auto",
    text_only: bool = False,
) -> None:
    """Make a folder of ours from a checkpoint of another project; byte for byte, and strict about names and shapes.

    Args:
        source: Folder with config.json and safetensors; nothing in it is run.
        destination: Folder to make.
        kind: Format of the source; told by its config by default.
        text_only: Leave out tensors that are not of the language model.
    """
    from attnres.interop import import_checkpoint

    format = import_checkpoint(source, destination, kind=kind, text_only=text_only)
    print(f"{destination}: imported from {format}")
