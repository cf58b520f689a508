"""``attnres bench op``: how fast one read is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from attnres.cli.parsing import parse
from attnres.errors import ConfigError


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(
            "usage: attnres bench op [OPTIONS]\n\nTime one read against its memory floor; see attnres bench op --help"
        )
    elif not arguments or arguments[0] != "op":
        raise ConfigError(f"benchmark is {repr(arguments[0]) if arguments else 'missing'}; allowed: op")
    else:
        parse(op, arguments[1:], command="bench op")


def op(
    *,
    sources: int = 9,
    tokens: int = 4096,
    dim: int = 512,
    dtype: Literal["float32", "bfloat16"] = "float32",
    repetitions: int = 7,
    csv: Path | None = None,
) -> None:
    """Time one read, forward and backward, as a multiple of its memory floor. Run it on an idle machine.

    Args:
        sources: Sources S of the read.
        tokens: Tokens T.
        dim: Width D.
        dtype: Of the sources.
        repetitions: Timed repetitions of each form, interleaved.
        csv: File to append the rows to.
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from attnres.bench.op import append, measure

    rows = list(measure(sources=sources, tokens=tokens, dim=dim, dtype=getattr(torch, dtype), repetitions=repetitions))
    table = Table(title=f"one read: {sources} sources x {tokens} tokens x {dim}, {dtype}")
    for column in ("form", "direction", "median ms", "± ms", "x floor"):
        table.add_column(column, justify="left" if column in ("form", "direction") else "right")
    for row in rows:
        numbers = (f"{row.median_ms:.2f}", f"{row.spread_ms:.2f}", f"{row.floor_multiple:.1f}")
        table.add_row(row.form, row.direction, *numbers)
    Console().print(table)
    if csv is not None:
        append(rows, csv)
