"""Result files: one CSV per benchmark, rows appended run after run, each with the machine it was measured on."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from attnres.bench.machine import Machine
from attnres.errors import ConfigError

Row = TypeVar("Row")


def columns(row_type: type[Any]) -> list[str]:
    """Header of the result file of a kind of row: the machine first, then the row's own fields."""
    return [field.name for kind in (Machine, row_type) for field in fields(kind)]


def prepare(path: Path, row_type: type[Any]) -> None:
    """Write the header of a new file, or refuse one that the rows would not fit; before anything is measured.

    Raises:
        ConfigError: The file has other columns, or ends in the middle of a line.
    """
    header = columns(row_type)
    if not path.exists() or path.stat().st_size == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(",".join(header) + "\n", encoding="utf-8")
        return
    text = path.read_text(encoding="utf-8")
    found = next(csv.reader(text.splitlines()), [])
    if found != header:
        raise ConfigError(f"{path} has other columns ({_difference(found, header)}); allowed: these, or a new file")
    if not text.endswith("\n"):
        raise ConfigError(f"{path} ends in the middle of a line; complete or remove that line")


def collect(rows: Iterable[Row], machine: Machine, path: Path | None) -> list[Row]:
    """Take rows as they are measured; with a path (see `prepare`), each is in the file before the next is measured."""
    kept = []
    for row in rows:
        kept.append(row)
        if path is not None:
            _append(path, {**asdict(machine), **asdict(row)})  # pyright: ignore[reportArgumentType]
    return kept


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a result file, oldest first, all values as text."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def significant(value: float, digits: int = 5) -> float:
    """A number rounded to a number of significant digits, so that files show no digits that mean nothing."""
    return float(f"{value:.{digits}g}")


def _difference(found: Sequence[str], wanted: Sequence[str]) -> str:
    more, fewer = [name for name in found if name not in wanted], [name for name in wanted if name not in found]
    words = [f"unknown: {', '.join(more)}"] * bool(more) + [f"missing: {', '.join(fewer)}"] * bool(fewer)
    return "; ".join(words) or "another order"


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8", newline="") as file:
        csv.DictWriter(file, list(row), lineterminator="\n").writerow(row)
