"""Verdicts as JSON and back, and as Markdown."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, final

from attnres import __version__
from attnres.errors import ConfigError, DataError
from attnres.testing.outcome import Outcome, Seen
from attnres.testing.registry import CHECKS
from attnres.testing.suite import Verdicts

FORMAT = 1
SIGNS = {"pass": "✓", "fail": "✗", "n/a": "·"}
BEGIN, END = "<!-- verdicts: begin -->", "<!-- verdicts: end -->"


@final
@dataclass(frozen=True)
class Report:
    """All implementations of one run."""

    verdicts: list[Verdicts]
    missing: dict[str, str] = field(default_factory=dict)
    """Adapters that could not run, and why."""
    date: str = field(default_factory=lambda: date.today().isoformat())
    torch: str = field(default_factory=lambda: metadata.version("torch").partition("+")[0])
    attnres: str = __version__

    @property
    def failed(self) -> bool:
        """Whether any check failed anywhere."""
        return any(verdicts.failures for verdicts in self.verdicts)


def to_json(report: Report) -> str:
    """As text; numbers with four digits."""
    head = {"format": FORMAT, "date": report.date, "versions": {"attnres": report.attnres, "torch": report.torch}}
    checks = {check.name: {"claim": check.claim, "level": check.level} for check in CHECKS.values()}
    adapters = [verdicts_as_dict(verdicts) for verdicts in report.verdicts]
    return json.dumps(head | {"checks": checks, "adapters": adapters, "missing": report.missing}, indent=1) + "\n"


def from_json(text: str) -> Report:
    """What `to_json` made.

    Raises:
        DataError: It is something else.
    """
    try:
        made = json.loads(text)
        versions = made["versions"]
        verdicts = [verdicts_from_dict(entry) for entry in made["adapters"]]
        return Report(verdicts, made["missing"], made["date"], versions["torch"], versions["attnres"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"these are no conformance verdicts: {error}") from error


def verdicts_as_dict(verdicts: Verdicts) -> dict[str, Any]:
    """For JSON."""
    entry = asdict(verdicts)
    entry["outcomes"] = [
        asdict(outcome) | {"seen": _plain(outcome.seen), "expected": _plain(outcome.expected)}
        for outcome in verdicts.outcomes
    ]
    return entry


def verdicts_from_dict(entry: dict[str, Any]) -> Verdicts:
    """What `verdicts_as_dict` made."""
    fields: dict[str, Any] = entry | {"outcomes": [Outcome(**outcome) for outcome in entry["outcomes"]]}
    return Verdicts(**fields)


def _plain(seen: Seen) -> Seen:
    """JSON has no nan and no infinity."""
    if isinstance(seen, float):
        return float(f"{seen:.4g}") if math.isfinite(seen) else str(seen)
    return seen


def show(seen: Seen) -> str:
    """A number in three digits, words as they are."""
    return seen if isinstance(seen, str) else f"{seen:.3g}"


def markdown(report: Report) -> str:
    """One row per check, one column per implementation, and the failures with their numbers."""
    return "\n\n".join([_implementations(report), _matrix(report), _failures(report)])


def _implementations(report: Report) -> str:
    rows = [
        [
            f"**{chr(65 + at)}**",
            one.name,
            one.version,
            one.definition,
            one.runs_on,
            *(str(one.count(status)) for status in ("pass", "fail", "n/a")),
        ]
        for at, one in enumerate(report.verdicts)
    ]
    head = f"Verdicts of {report.date}, torch {report.torch}, attnres {report.attnres}."
    table = _table(["", "implementation", "version", "held to", "ran on", "pass", "fail", "n/a"], rows)
    missing = "".join(f"\n\nNot run: {name} ({why})." for name, why in report.missing.items())
    return f"{head}\n\n{table}{missing}"


def _matrix(report: Report) -> str:
    names = [chr(65 + at) for at in range(len(report.verdicts))]
    signs = [{outcome.check: SIGNS[outcome.status] for outcome in one.outcomes} for one in report.verdicts]
    rows = [
        [
            f"`{check.name}`" + ("\\*" if check.is_beyond else ""),
            check.claim,
            *(each.get(check.name, "") for each in signs),
        ]
        for check in CHECKS.values()
        if any(check.name in each for each in signs)
    ]
    note = "\\* a promise of attnres beyond the paper's formulas. ✓ pass, ✗ fail, · not applicable."
    return f"{_table(['check', 'what has to be true', *names], rows)}\n\n{note}"


def _failures(report: Report) -> str:
    rows = [
        [one.name, f"`{outcome.check}`", outcome.where, show(outcome.seen), show(outcome.expected)]
        for one in report.verdicts
        for outcome in one.failures
    ]
    return (
        _table(["implementation", "check", "case", "seen", "expected, or allowed"], rows)
        if rows
        else "No check failed."
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split("\n"))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def update_page(page: Path, report: Report) -> None:
    """Put the tables between the two marks of a page.

    Raises:
        DataError: The page has no marks.
    """
    before, after = _around(page)
    tables = markdown(from_json(to_json(report)))  # the same digits as the file's
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}", encoding="utf-8")


def check_targets(json: Path | None, page: Path | None) -> None:
    """Refuse files that cannot be written, before anything is run.

    Raises:
        ConfigError: One is a folder, is in a folder that does not exist, or may not be written; or there is no page.
        DataError: The page has no marks.
    """
    for option, path in (("--json", json), ("--page", page)):
        if path is None:
            continue
        if path.is_dir():
            raise ConfigError(f"{option} is {str(path)!r}, which is a folder; allowed: a file")
        if not path.parent.is_dir():
            raise ConfigError(f"{option} is {str(path)!r}, and there is no folder {str(path.parent)!r}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{option} is {str(path)!r}, which may not be written")
    if page is not None:
        if not page.is_file():
            raise ConfigError(f"--page is {str(page)!r}, and there is no such file")
        _around(page)


def _around(page: Path) -> tuple[str, str]:
    """What is before and after the verdicts of a page."""
    try:
        text = page.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{page} is no text: {error}") from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise DataError(f"{page} has no place for verdicts: {BEGIN} and {END}")
    return before, after
