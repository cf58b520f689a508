"""Verdicts as tables for a terminal."""

from rich.markup import escape
from rich.table import Table

from attnres.testing.registry import CHECKS
from attnres.testing.report import SIGNS, Report, show
from attnres.testing.suite import Verdicts

COLOURS = {"pass": "green", "fail": "bold red", "n/a": "dim"}


def outcomes(verdicts: Verdicts) -> Table:
    """All checks of one implementation."""
    table = Table("check", "verdict", "case", "seen", "expected, or allowed", title=escape(verdicts.name))
    for outcome in verdicts.outcomes:
        colour = COLOURS[outcome.status]
        word = f"[{colour}]{outcome.status}[/{colour}]"
        table.add_row(
            marked(outcome.check), word, *map(escape, (outcome.where, show(outcome.seen), show(outcome.expected)))
        )
    return table


def matrix(report: Report) -> Table:
    """Checks by implementations."""
    table = Table("check", *(escape(one.name) for one in report.verdicts))
    verdicts = [{outcome.check: outcome.status for outcome in one.outcomes} for one in report.verdicts]
    for name in CHECKS:
        if any(name in one for one in verdicts):
            words = [one[name] for one in verdicts]
            table.add_row(marked(name), *(f"[{COLOURS[word]}]{SIGNS[word]} {word}[/{COLOURS[word]}]" for word in words))
    return table


def failures(report: Report) -> Table:
    """What failed, with its numbers."""
    table = Table("implementation", "check", "case", "seen", "expected, or allowed", title="failures")
    for one in report.verdicts:
        for outcome in one.failures:
            words = (outcome.where, show(outcome.seen), show(outcome.expected))
            table.add_row(escape(one.name), marked(outcome.check), *map(escape, words))
    return table


def marked(name: str) -> str:
    """A check's name, with a star if it is a promise beyond the paper's formulas."""
    return f"{name}*" if CHECKS[name].is_beyond else name


def counts(verdicts: Verdicts) -> str:
    """How many checks ended how."""
    beyond = sum(CHECKS[outcome.check].is_beyond for outcome in verdicts.failures)
    fail = f"{verdicts.count('fail')} fail" + (f" ({beyond} of them *)" if beyond else "")
    return f"{verdicts.count('pass')} pass, {fail}, {verdicts.count('n/a')} n/a"
