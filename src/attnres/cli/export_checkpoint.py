"""``attnres export``: a run as a Hugging Face folder, or a model of ours as a checkpoint of another project."""

from collections.abc import Sequence
from typing import Literal

from attnres.cli.conversion import Destination, Source
from attnres.cli.parsing import parse
from attnres.errors import ConfigError


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parse(export_command, arguments, command="export")


def export_command(
    source: Source,
    destination: Destination,
    /,
    *,
    kind: Literal["auto", "hugging-face", "kimi-k3", "fla", "inkling2"] = "auto",
) -> None:
    """Make a Hugging Face folder of a run, or a checkpoint in the format of another project from a folder of ours.

    Args:
        source: Run folder, whose newest checkpoint is taken, or Hugging Face folder of ours.
        destination: Folder to make.
        kind: Format of the destination. By default that of Hugging Face for a run, and for a folder that from which
            it was imported; the latter byte for byte.
    """
    from attnres.experiments.export import export_run
    from attnres.experiments.folders import kind_of
    from attnres.interop import export_checkpoint

    if kind_of(source) == "run" or kind == "hugging-face":
        if kind not in ("auto", "hugging-face"):
            raise ConfigError(
                f"kind is {kind!r}, but {source} is a run folder; allowed is hugging-face, and then {kind}"
            )
        checkpoint = export_run(source, destination)
        print(f"{destination}: exported from {checkpoint}")
        return
    format = export_checkpoint(source, destination, kind=kind)
    print(f"{destination}: exported to {format}")
