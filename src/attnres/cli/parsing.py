"""Command-line arguments to typed values, by tyro, with its error boxes told in one line."""

import contextlib
import io
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from attnres.errors import ConfigError


def parse(function: Callable[..., Any], arguments: Sequence[str], *, command: str) -> Any:
    """Call ``function`` with the arguments that its signature describes.

    Raises:
        ConfigError: An argument is unknown, missing or not allowed; one line says which.
    """
    return _settle(function, arguments, command)()


def _settle(function: Callable[..., Any], arguments: Sequence[str], command: str) -> Callable[[], Any]:
    """Parse now, call later: only what parsing prints is an error of parsing."""
    captured = io.StringIO()
    asks_for_help = any(argument in ("-h", "--help") for argument in arguments)
    guard = contextlib.nullcontext() if asks_for_help else contextlib.redirect_stderr(captured)
    call: list[Callable[[], Any]] = []
    deferred = _deferred(function, call)
    try:
        with guard, _wide(not asks_for_help):
            tyro.cli(
                deferred, args=list(arguments), prog=f"attnres {command}", config=(tyro.conf.HelptextFromCommentsOff,)
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(f"{_one_line(captured.getvalue())} (see attnres {command} --help)") from None
    return call[0]


def _deferred(function: Callable[..., Any], call: list[Callable[[], Any]]) -> Callable[..., None]:
    """A function of the same signature and help that only notes how it was called."""
    import functools

    @functools.wraps(function)
    def note(*args: Any, **kwargs: Any) -> None:
        call.append(lambda: function(*args, **kwargs))

    return note


@contextlib.contextmanager
def _wide(enabled: bool) -> Any:
    """So that no message is broken over lines by the width of the terminal."""
    before = os.environ.get("COLUMNS")
    if enabled:
        os.environ["COLUMNS"] = "2000"
    try:
        yield
    finally:
        if enabled:
            os.environ.pop("COLUMNS")
            if before is not None:
                os.environ["COLUMNS"] = before


def _one_line(box: str) -> str:
    """The message of an error box, and the options it suggests."""
    title, *parts = _parts(box)
    if not parts:
        return " ".join(title) or "the arguments cannot be read"
    message = " ".join(parts[0]).rstrip(".")
    for part in parts[1:]:
        if part[0].startswith("Perhaps you meant"):
            options = [row.split()[0] for row in part[1:] if row.startswith("--")]
            message += f"; perhaps you meant {' or '.join(options)}"
    return message


def _parts(box: str) -> list[list[str]]:
    """Title and sections of an error box, drawn with lines or, where the output cannot show them, with hyphens."""
    parts: list[list[str]] = [[]]
    for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines():
        row = line.strip(" │╭╮╰╯")
        if row.startswith("─ "):  # the upper edge, with the title in it
            parts.append([row.strip("─ ")])
            parts.append([])
        elif set(row) <= {"─", "-"}:
            parts.append([])
        else:
            parts[-1].append(row)
    return [part for part in parts if part] or [[]]


def peek(arguments: Sequence[str], option: str) -> str | None:
    """The value of an option before everything is parsed, because the types of others depend on it; the last counts."""
    found = None
    for index, argument in enumerate(arguments):
        if argument == option and index + 1 < len(arguments):
            found = arguments[index + 1]
        elif argument.startswith(f"{option}="):
            found = argument.partition("=")[2]
    return found
