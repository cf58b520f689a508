"""The result of a run, from its metrics file so that it holds for the whole run however often it was resumed."""

import statistics
from collections.abc import Mapping
from pathlib import Path

from attnres.optim import is_depth_parameter
from attnres.train.config import RunConfig
from attnres.train.environment import describe_mesh
from attnres.train.position import Position
from attnres.train.tracker import Row, read_metrics


def build_result(
    folder: Path, config: RunConfig, sizes: Mapping[str, int], position: Position, *, peak_memory_bytes: int
) -> Row:
    """Contents of ``result.json``.

    Args:
        folder: Run folder with all metrics in it.
        config: Resolved settings; their mesh is that of the last start, while speed is the median over all of them.
        sizes: Numbers in each parameter of the model, tied ones once.
        position: Where the run ended.
        peak_memory_bytes: Largest memory of the run.
    """
    rows = read_metrics(folder)
    valid = [row for row in rows if row["kind"] == "valid"][-1]
    return {
        "valid_loss": valid["loss"],
        "bits_per_byte": valid["bits_per_byte"],
        "steps": position.step,
        "tokens": position.tokens,
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in rows if row["kind"] == "train"),
        **describe_mesh(config.parallel),
        "seconds": position.seconds,
        "peak_memory_bytes": peak_memory_bytes,
        "parameters": sum(sizes.values()),
        "extra_parameters": sum(size for name, size in sizes.items() if is_depth_parameter(name)),
    }
