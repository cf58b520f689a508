"""``attnres conformance``: check an implementation of Attention Residuals against the definition."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from attnres.cli.parsing import parse
from attnres.errors import ConfigError

if TYPE_CHECKING:
    from attnres.testing.registry import Check
    from attnres.testing.report import Report


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parse(conformance, arguments, command="conformance")


def conformance(
    *,
    adapter: tuple[str, ...] = (),
    all_shipped: Annotated[bool, tyro.conf.arg(name="all")] = False,
    check: tuple[str, ...] = (),
    json: str | None = None,
    page: Path | None = None,
    list_all: Annotated[bool, tyro.conf.arg(name="list")] = False,
) -> None:
    """Check implementations of Attention Residuals against the definition.

    Prints a table: for each check pass, fail or not applicable, with what was seen and what is expected; a star is at
    checks that are a promise of ours beyond the paper's formulas. Exit status 0:
    no check failed; 1: some check failed, in whichever implementation; 2: a mistake in the input. docs/conformance.md
    says how to write an adapter.

    Args:
        adapter: A file.py with an adapter, file.py:Class, module:Class, or the word of a shipped one (see --list).
        all_shipped: Check every shipped adapter that can run here, our own and other people's.
        check: Only these checks, areas or levels, such as value.eps, schedule or definition (what follows from the
            paper's formulas, without the promises beyond them).
        json: File for the verdicts as JSON; - prints them instead of the table.
        page: Markdown page whose table of verdicts is brought up to date.
        list_all: Print the checks and the shipped adapters, and stop.
    """
    from attnres.testing.report import check_targets, to_json, update_page
    from attnres.testing.suite import select

    checks = select(check)
    if list_all:
        _list(checks)
        return
    if bool(adapter) == all_shipped:
        raise ConfigError("give either --adapter, with a file or the word of a shipped one, or --all")
    check_targets(None if json in (None, "-") else Path(json), page)
    report = _run(adapter, checks)
    if json == "-":
        print(to_json(report), end="")
    else:
        _show(report)
    if json not in (None, "-"):
        Path(json).write_text(to_json(report), encoding="utf-8")
    if page is not None:
        update_page(page, report)
    if report.failed:
        raise SystemExit(1)


def _run(places: Sequence[str], checks: "Sequence[Check]") -> "Report":
    """Those at ``places``, or every shipped one; what runs in a process of its own runs beside the others."""
    from attnres.testing.adapters import SHIPPED, shipped
    from attnres.testing.load import load_adapter
    from attnres.testing.process import Running
    from attnres.testing.report import Report
    from attnres.testing.suite import run

    missing = {}
    for name in places or SHIPPED:
        problem = shipped(name).problem() if name in SHIPPED else None
        if problem is not None and places:
            raise ConfigError(f"adapter {name} cannot run here: {problem}")
        if problem is not None:
            missing[name] = problem
    names = [name for name in places or SHIPPED if name not in missing]
    own = {name: load_adapter(name) for name in names if name.endswith(".py") or ":" in name}
    running = {name: Running(shipped(name), checks) for name in names if name not in own}
    verdicts = []
    try:
        for name in names:
            print(f"checking {name}", file=sys.stderr)
            verdicts.append(run(own[name], checks) if name in own else running[name].verdicts())
    finally:
        for one in running.values():
            one.stop()
    return Report(verdicts, missing)


def _show(report: "Report") -> None:
    from attnres.cli.console import wide_console
    from attnres.testing.tables import counts, failures, matrix, outcomes

    console = wide_console()
    if len(report.verdicts) == 1:
        console.print(outcomes(report.verdicts[0]))
    else:
        console.print(matrix(report))
        if report.failed:
            console.print(failures(report))
    print("* a promise of attnres beyond the paper's formulas")
    for one in report.verdicts:
        print(f"{one.title}, held to {one.definition}, on {one.runs_on}: {counts(one)}")
    for name, why in report.missing.items():
        print(f"not run: {name} ({why})")


def _list(checks: "Sequence[Check]") -> None:
    from attnres.testing.adapters import SHIPPED

    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.name:<{width}}  {check.level:<10}  {check.claim}")
    print()
    for name, one in SHIPPED.items():
        place = "can run here, in Triton's interpreter" if one.needs_interpreter else "can run here"
        print(f"{name:<{width}}  {one.problem() or place}")
