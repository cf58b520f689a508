"""A report as tables whose every number says by which formula it came about; for people, and as JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Cell = float | int | str | None


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table."""

    key: str
    """Name in JSON."""
    title: str
    """Name for people."""
    unit: str = "text"
    """What its numbers are, see `shown`; ``"text"`` and ``"index"`` are names of rows."""
    formula: str = ""
    """How its numbers come about; empty for names, and where each row has a formula of its own."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table."""

    key: str
    """Name in JSON."""
    title: str
    """Name for people."""
    columns: tuple[Column, ...]
    """Its columns."""
    rows: tuple[tuple[Cell, ...], ...]
    """Its rows, in exact numbers."""
    notes: tuple[str, ...] = ()
    """What to know about it."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: a row for each row, and the formula and unit of each column that has one."""
        keys = [column.key for column in self.columns]
        return {
            "title": self.title,
            "formulas": {column.key: column.formula for column in self.columns if column.formula},
            "units": {column.key: column.unit for column in self.columns if column.unit != "text"},
            "rows": [dict(zip(keys, row, strict=True)) for row in self.rows],
            "notes": list(self.notes),
        }

    def texts(self) -> list[list[str]]:
        """The rows as people read them."""
        return [
            [shown(cell, self._unit(column, row)) for column, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]

    def _unit(self, column: Column, row: Sequence[Cell]) -> str:
        """A column may say in which other column the unit of each row is."""
        if not column.unit.startswith("as "):
            return column.unit
        place = [other.key for other in self.columns].index(column.unit.removeprefix("as "))
        return str(row[place])

    @property
    def visible(self) -> tuple[int, ...]:
        """Places of the columns that people are shown: all but the one that holds units."""
        units = {column.unit.removeprefix("as ") for column in self.columns if column.unit.startswith("as ")}
        return tuple(place for place, column in enumerate(self.columns) if column.key not in units)

    @property
    def footnotes(self) -> tuple[str, ...]:
        """Formulas of the columns, those that share one together, and notes."""
        titles: dict[str, list[str]] = {}
        for column in self.columns:
            if column.formula:
                titles.setdefault(column.formula, []).append(column.title)
        return (*(f"{', '.join(names)}: {formula}" for formula, names in titles.items()), *self.notes)


Quantity = tuple[str, Cell, str, str]
"""One number: what it is, how much (None where that is not known), its unit, and how it came about."""


def quantities(key: str, title: str, rows: Sequence[Quantity], *notes: str) -> Table:
    """A table of single numbers."""
    return Table(
        key=key,
        title=title,
        columns=(
            Column(key="name", title="what"),
            Column(key="value", title="value", unit="as unit"),
            Column(key="unit", title="unit"),
            Column(key="formula", title="formula"),
        ),
        rows=tuple(rows),
        notes=notes,
    )


def shown(value: Cell, unit: str) -> str:
    """A number for people, with its unit.

    Examples:
        >>> shown(48.4e9, "parameters"), shown(15032385536, "bytes"), shown(0.00123, "seconds"), shown(0.031, "share")
        ('48.4 B', '15.03 GB', '1.230 ms', '3.10 %')
    """
    if value is None:
        return "not known"
    if isinstance(value, str):
        return value
    if unit in _FORMATS:
        return _FORMATS[unit](value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _scaled(value: float, steps: Mapping[float, str], digits: int) -> str:
    for step, name in steps.items():
        if abs(value) >= step:
            return f"{value / step:.{digits}f} {name}".strip()
    return f"{value:.{digits}g}" if value else "0"


def _significant(value: float, names: Sequence[tuple[float, str]]) -> str:
    for step, name in names:
        if abs(value) >= step:
            return f"{value / step:.4g} {name}".strip()
    return f"{value:.4g}"


_COUNT = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_FLOP = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"))
_FORMATS: dict[str, Callable[[float], str]] = {
    "parameters": lambda value: _significant(value, _COUNT),
    "flop": lambda value: _significant(value, _FLOP),
    "bytes": lambda value: _scaled(value, {1e12: "TB", 1e9: "GB", 1e6: "MB", 1e3: "kB", 1.0: "B"}, 2),
    "flop per second": lambda value: f"{_significant(value, _FLOP)}/s",
    "bytes per second": lambda value: f"{_FORMATS['bytes'](value)}/s",
    "seconds": lambda value: _scaled(value, {1.0: "s", 1e-3: "ms", 1e-6: "us"}, 3),
    "share": lambda value: f"{100 * value:.2f} %" if not 0 < abs(value) < 1e-4 else f"{100 * value:.2g} %",
    "vectors": lambda value: f"{value:.4g}d",
    "tensors": lambda value: f"{value:.4g}",
}
"""How numbers of a unit are written; others are written as they are."""
