"""What `convert`, `unconvert`, `import` and `export` share: folders, the text that is read, how a result is told."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from attnres.errors import DataError

if TYPE_CHECKING:
    from attnres.interop.conversion import ConversionReport

Device = Literal["auto", "cpu", "cuda"]
Source = Annotated[Path, tyro.conf.arg(metavar="SRC")]
Destination = Annotated[Path, tyro.conf.arg(metavar="DST")]


def text_of(path: Path | None) -> str | None:
    """The text in a file; None without one.

    Raises:
        DataError: It is not UTF-8, or empty.
    """
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8 ({error.reason} at byte {error.start})") from error
    if not text.strip():
        raise DataError(f"{path} is empty; allowed is some text")
    return text


def show_report(report: "ConversionReport", destination: Path, *, as_json: bool) -> None:
    """Print what the two models said, and where the new one is."""
    if as_json:
        print(json.dumps({"destination": str(destination), **report.to_dict()}, indent=2))
        return
    what = "put in" if report.model.startswith("AttnRes") else "taken out"
    verdict = "the same to rounding" if report.is_lossless else "CHANGED"
    print(
        f"{destination}: {report.model}, {report.layers} layers; {report.strategy} {what}: {report.sites} sites, "
        f"{report.residual_parameters:,} parameters\n"
        f"  largest logit difference  {report.largest_difference:.3g}, of logits up to {report.largest_logit:.3g} "
        f"({report.relative_difference:.2g} relative; {verdict})\n"
        f"  perplexity                {report.perplexity_before:.6g} before, {report.perplexity_after:.6g} after "
        f"({report.tokens} tokens)"
    )
    if report.scale_sensitive:
        print(f"  reads without a norm      {', '.join(report.scale_sensitive)}")
