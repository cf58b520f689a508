"""Running the checks on an implementation."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final, get_args

import attnres.testing.checks  # noqa: F401  (fills the list of checks)
from attnres.errors import ConfigError
from attnres.testing.adapter import Adapter
from attnres.testing.outcome import Outcome, Status, settle
from attnres.testing.registry import CHECKS, Check, Level


@final
@dataclass(frozen=True)
class Verdicts:
    """All outcomes of one implementation."""

    name: str
    version: str
    definition: str
    """Name of the definition it was held to."""
    runs_on: str
    """Device, or that its kernels were interpreted."""
    outcomes: list[Outcome]

    def count(self, status: Status) -> int:
        """How many checks ended so."""
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def failures(self) -> list[Outcome]:
        """The outcomes that are failures."""
        return [outcome for outcome in self.outcomes if outcome.status == "fail"]

    @property
    def title(self) -> str:
        """Name and, where there is one, version."""
        return f"{self.name} {self.version}".strip()


def select(names: Iterable[str] = ()) -> list[Check]:
    """The checks of these names, areas or levels, in the suite's order; without names, all.

    Raises:
        ConfigError: There is no check, area or level of a name.
    """
    wanted = list(names)
    areas, levels = {check.area for check in CHECKS.values()}, get_args(Level)
    for name in wanted:
        if name not in CHECKS and name not in areas and name not in levels:
            raise ConfigError(
                f"check is {name!r}; allowed: the areas {', '.join(sorted(areas))}, "
                f"the levels {' and '.join(levels)}, or a check of --list"
            )
    return [
        check for check in CHECKS.values() if not wanted or not {check.name, check.area, check.level}.isdisjoint(wanted)
    ]


def run(adapter: Adapter, checks: Iterable[Check] | None = None) -> Verdicts:
    """Put the checks to an implementation; it may warn and raise as it likes.

    Examples:
        >>> from attnres.testing.adapters.ours import Reference
        >>> [outcome.status for outcome in run(Reference(), select(["value.score_scale", "init.queries"])).outcomes]
        ['pass', 'pass']
    """
    outcomes = []
    for check in select() if checks is None else checks:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcomes.append(_settled(adapter, check))
    runs_on = "Triton interpreter" if adapter.is_interpreted else adapter.device
    return Verdicts(adapter.name, adapter.version, adapter.definition.name, runs_on, outcomes)


def _settled(adapter: Adapter, check: Check) -> Outcome:
    outcome = settle(check.name, check.function(adapter))
    if outcome.status == "n/a" and outcome.where == "no case":
        return Outcome(check=check.name, status="n/a", where=f"not in the definition {adapter.definition.name}")
    return outcome
