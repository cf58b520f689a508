"""``attnres eval``: validation loss of a trained model."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from attnres.cli.parsing import parse


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parse(eval_command, arguments, command="eval")


def eval_command(
    folder: Path,
    /,
    *,
    split: Literal["valid", "train"] = "valid",
    sequences: int | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Evaluate the newest checkpoint of a run.

    Args:
        folder: Run folder.
        split: Part of the run's dataset.
        sequences: Windows to read, evenly spread over the split; all of them by default.
        as_json: Print JSON instead of a line.
    """
    from attnres.errors import ConfigError
    from attnres.experiments.trained import evaluate, load_trained

    if sequences is not None and sequences < 1:
        raise ConfigError(f"sequences is {sequences}; allowed: 1 or more")
    trained = load_trained(folder)
    loss, bits_per_byte = evaluate(trained, split=split, sequences=sequences)
    numbers = {"split": split, "loss": loss, "bits_per_byte": bits_per_byte, "perplexity": math.exp(loss)}
    if as_json:
        print(json.dumps({"checkpoint": str(trained.checkpoint), **numbers}))
        return
    print(
        f"{trained.checkpoint}: {split} loss {loss:.4f} nats/token, {bits_per_byte:.4f} bits/byte, "
        f"perplexity {math.exp(loss):.2f}"
    )
