"""The list of checks: each is a function that yields findings, with a name, and what it stands for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, final

from attnres.testing.adapter import Adapter
from attnres.testing.outcome import Finding

Level = Literal["definition", "contract"]
Function = Callable[[Adapter], Iterator[Finding]]


@final
@dataclass(frozen=True)
class Check:
    """One question put to an implementation."""

    name: str
    """``area.topic``."""
    claim: str
    """What has to be true, in a line."""
    level: Level
    """``"definition"``: follows from the paper's formulas. ``"contract"``: what attnres promises beyond them."""
    function: Function

    @property
    def area(self) -> str:
        """The part of the name before the dot."""
        return self.name.partition(".")[0]

    @property
    def is_beyond(self) -> bool:
        """Whether it is a promise beyond the paper's formulas."""
        return self.level == "contract"


CHECKS: dict[str, Check] = {}


def check(name: str, claim: str, level: Level = "definition") -> Callable[[Function], Function]:
    """Put a function among the checks."""

    def register(function: Function) -> Function:
        assert name not in CHECKS
        CHECKS[name] = Check(name, claim, level, function)
        return function

    return register
