"""``attnres strategies``: list every residual strategy with its rule and what it costs."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from attnres.cli.console import wide_console
from attnres.cli.parsing import parse
from attnres.errors import ConfigError
from attnres.experiments.catalog import Entry, catalog, catalog_markdown


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parse(strategies, arguments, command="strategies")


def strategies(
    *,
    layers: int = 16,
    hidden_size: int = 1024,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    markdown: bool = False,
) -> None:
    """List every residual strategy: its word for --residual and --arms, its rule, and what it costs.

    In a rule h is what a sublayer reads, v what it puts out, x or X what the residual path holds. Costs are counted by
    running one token through: parameters of the whole path; the most it holds between sublayers and what it reads and
    writes per sublayer, both in tensors of D numbers per token, every step taken as one fused kernel.

    Args:
        layers: Decoder layers; two sublayers each.
        hidden_size: Width D.
        as_json: Print JSON, with settings and their defaults.
        markdown: Print a Markdown table.
    """
    if as_json and markdown:
        raise ConfigError("both --json and --markdown are given; allowed is one of them")
    entries = catalog(num_sublayers=2 * layers, dim=hidden_size)
    if as_json:
        print(json.dumps([entry.to_dict() for entry in entries], indent=2))
    elif markdown:
        print(catalog_markdown(entries), end="")
    else:
        wide_console().print(_table(entries, layers, hidden_size))


def _table(entries: Sequence[Entry], layers: int, hidden_size: int) -> Any:
    from rich import box
    from rich.table import Table

    caption = (
        f"{layers} layers of width {hidden_size}, default settings. param.: of the residual path. state, moved: "
        "tensors of D numbers per token, at most and per sublayer. Settings: attnres train --residual NAME --help."
    )
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", padding=(0, 1), pad_edge=False)
    for title, justify in (("name", "left"), ("rule", "left"), ("param.", "right"), ("state", "right")):
        table.add_column(title, justify=justify, no_wrap=title == "name")  # pyright: ignore[reportArgumentType]
    table.add_column("moved", justify="right")
    table.add_column("source")
    group = None
    for entry in entries:
        if entry.group != group:
            group = entry.group
            table.add_row(f"[bold]{group}[/bold]")
        table.add_row(entry.name, _escaped(entry.formula), *entry.numbers, entry.citation)
        if entry.problem is not None:
            table.add_row("", f"[dim]does not fit: {_escaped(entry.problem)}[/dim]")
    return table


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
