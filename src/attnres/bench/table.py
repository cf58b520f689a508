"""Rows as a table for people: what all rows share goes into the title, what is empty everywhere is left out."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from attnres.bench.machine import Machine

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


def render(title: str, rows: Sequence[Any], machine: Machine, *, by: Sequence[str]) -> "Group":
    """Tables of rows of one kind, for the rich console: one for each set of values of the columns ``by``."""
    from rich.console import Group

    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in map(asdict, rows):
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return Group(*(_table(title, group, by) for group in groups.values()), _where(machine))


def _table(title: str, rows: Sequence[dict[str, Any]], by: Sequence[str]) -> "Table":
    from rich.table import Table

    shared = [name for name in rows[0] if name in by or len({str(row[name]) for row in rows}) == 1 < len(rows)]
    told = ", ".join(f"{name} {_cell(rows[0][name])}" for name in shared if rows[0][name] not in (None, ""))
    table = Table(title=f"{title}: {told}".replace("_", " "), title_justify="left")
    for name in [name for name in rows[0] if name not in shared]:
        is_number = any(isinstance(row[name], int | float) and not isinstance(row[name], bool) for row in rows)
        table.add_column(name.replace("_", " "), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for name, value in row.items() if name not in shared))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _where(machine: Machine) -> str:
    threads = f", {machine.threads} threads" if machine.device == "cpu" else ""
    code = f"torch {machine.torch}, attnres {machine.attnres} {machine.commit}".rstrip()
    return f"{machine.processor}{threads}, {code}, {machine.date}"
