"""``attnres unconvert``: the plain model back out of a converted checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from attnres.cli.conversion import Destination, Device, Source, show_report, text_of
from attnres.cli.parsing import parse


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parse(unconvert, arguments, command="unconvert")


def unconvert(
    source: Source,
    destination: Destination,
    /,
    *,
    text_file: Path | None = None,
    tokens: int = 512,
    allow_change: bool = False,
    device: Device = "auto",
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Take the residual strategy out of a checkpoint: the plain model of its family, with the weights as they are.

    Both models read a text, in float32, and what differs is printed. While pseudo-queries are zero and reads are sums
    that is rounding; otherwise it is what the residual path has learned, and nothing is written unless that is allowed.

    Args:
        source: Folder of a converted model.
        destination: Folder to make.
        text_file: What both models read, in UTF-8; held-out words of the bundled corpus by default.
        tokens: At most so many tokens of it, and no more than the model's context.
        allow_change: Write even if the plain model says something else.
        device: Where the models run; auto is a GPU where there is one.
        as_json: Print JSON.
    """
    from attnres.interop.conversion import unconvert_checkpoint
    from attnres.train import resolve_device

    report = unconvert_checkpoint(
        source,
        destination,
        text=text_of(text_file),
        tokens=tokens,
        allow_change=allow_change,
        device=resolve_device(device),
    )
    show_report(report, destination, as_json=as_json)
