"""Verdicts as tables for a terminal."""

from rich.table import Table

from attnres.testing.registry import CHECKS
from attnres.testing.report import SIGNS, Report, show
from attnres.testing.suite import Verdicts

COLOURS = {"pass": "green", "fail": "bold red", "n/a": "dim"}


def outcomes(verdicts: Verdicts) -> Table:
    """All checks of one implementation."""
    table = Table("check", "verdict", "case", "seen", "expected, or allowed", title=verdicts.name)
    for outcome in verdicts.outcomes:
        colour = COLOURS[outcome.status]
        word = f"[{colour}]{outcome.status}[/{colour}]"
        table.add_row(outcome.check, word, *map(_plain, (outcome.where, show(outcome.seen), show(outcome.expected))))
    return table


def matrix(report: Report) -> Table:
    """Checks by implementations."""
    table = Table("check", *(one.name for one in report.verdicts))
    verdicts = [{outcome.check: outcome.status for outcome in one.outcomes} for one in report.verdicts]
    for name in CHECKS:
        if any(name in one for one in verdicts):
            words = [one[name] for one in verdicts]
            table.add_row(name, *(f"[{COLOURS[word]}]{SIGNS[word]} {word}[/{COLOURS[word]}]" for word in words))
    return table


def failures(report: Report) -> Table:
    """What failed, with its numbers."""
    table = Table("implementation", "check", "case", "seen", "expected, or allowed", title="failures")
    for one in report.verdicts:
        for outcome in one.failures:
            table.add_row(
                one.name, outcome.check, *map(_plain, (outcome.where, show(outcome.seen), show(outcome.expected)))
            )
    return table


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # no markup of rich's
