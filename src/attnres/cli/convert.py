"""``attnres convert``: a trained checkpoint with a residual strategy put in, without loss."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from attnres.cli.conversion import Destination, Device, Source, show_report, text_of
from attnres.cli.options import residual_default
from attnres.cli.parsing import parse
from attnres.experiments.arms import strategy_of
from attnres.residual import STRATEGIES


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parse(_command(arguments), arguments, command="convert")


def _command(arguments: Sequence[str]) -> Any:
    """The command's function; its options are those of the strategy named."""
    name, strategy = residual_default(["--residual", "block", *arguments], strategy_of("block", {}))
    strategy_type, names = type(strategy), Literal[tuple(STRATEGIES)]

    def convert(
        source: Source,
        destination: Destination,
        /,
        *,
        residual_name: Annotated[names, tyro.conf.arg(name="residual")] = name,  # pyright: ignore[reportInvalidTypeForm]
        residual: strategy_type = strategy,  # pyright: ignore[reportInvalidTypeForm]
        text_file: Path | None = None,
        tokens: int = 512,
        allow_change: bool = False,
        remote_code: bool = False,
        device: Device = "auto",
        as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    ) -> None:
        """Put a residual strategy into a trained checkpoint.

        Both models read a text, in float32, and what differs is printed; if it is more than rounding, nothing is
        written. With zero pseudo-queries, as they start, and reads that are sums, as they are by default here, Full and
        Block AttnRes are the same function as the plain model. Weights are copied byte for byte.

        Args:
            source: Hugging Face folder with config.json, safetensors and a tokenizer. Nothing in it is run.
            destination: Folder to make.
            residual_name: Residual strategy; its settings are the --residual.* options.
            residual: Settings of the strategy.
            text_file: What both models read, in UTF-8; held-out words of the bundled corpus by default.
            tokens: At most so many tokens of it, and no more than the model's context.
            allow_change: Write even if the converted model says something else.
            remote_code: Also write code with which Transformers reads the folder where attnres is not installed, for
                trust_remote_code=True. Full and Block AttnRes only.
            device: Where the models run; auto is a GPU where there is one.
            as_json: Print JSON.
        """
        del residual_name
        from attnres.interop.conversion import convert_checkpoint
        from attnres.train import resolve_device

        report = convert_checkpoint(
            source,
            destination,
            residual,
            text=text_of(text_file),
            tokens=tokens,
            allow_change=allow_change,
            remote_code=remote_code,
            device=resolve_device(device),
        )
        show_report(report, destination, as_json=as_json)

    return convert
