"""The table of all strategies: rule, source, settings and costs of each."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnres.analysis.numbers import DASH
from attnres.errors import ConfigError
from attnres.experiments.arms import strategy_of
from attnres.residual import PreNorm, Strategy
from attnres.residual.costs import costs
from attnres.residual.registry import GROUPS


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One strategy."""

    group: str
    """Where it belongs."""
    name: str
    """Its word on the command line."""
    label: str
    """Its name in tables and legends."""
    formula: str
    """Its rule in one line."""
    citation: str
    """Where it comes from."""
    parameters: int | None
    """Of the whole residual path; this and the next two are None where the strategy does not fit depth or width."""
    state: float | None
    """The most it holds between sublayers, in tensors of D numbers per token."""
    moved: float | None
    """Read and written per token and sublayer, in tensors of D numbers."""
    problem: str | None
    """Why it does not fit."""
    settings: dict[str, Any]
    """Settings and their defaults."""

    @property
    def numbers(self) -> tuple[str, str, str]:
        """Parameters, state and traffic as text."""
        if self.parameters is None or self.state is None or self.moved is None:
            return DASH, DASH, DASH
        return f"{self.parameters:,}", f"{self.state:.4g}", f"{self.moved:.3g}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def catalog(*, num_sublayers: int, dim: int) -> list[Entry]:
    """Every strategy in the order of the registry, with its default settings.

    Raises:
        ConfigError: There is no sublayer, or no width.
    """
    costs(PreNorm(), num_sublayers, dim)
    return [
        _entry(group, strategy_of(cls.short_name, {}), num_sublayers, dim)
        for group, members in GROUPS.items()
        for cls in members
    ]


def catalog_markdown(entries: Sequence[Entry]) -> str:
    """The table as Markdown, one part per group."""
    lines: list[str] = []
    group = None
    for entry in entries:
        if entry.group != group:
            group = entry.group
            lines += [*([""] if lines else []), f"## {group[0].upper()}{group[1:]}", ""]
            lines += ["| name | rule | parameters | state | moved | source |", "|---|---|---:|---:|---:|---|"]
        rule = entry.formula.replace("|", "\\|")
        numbers = " | ".join(entry.numbers)
        lines.append(f"| `{entry.name}` | `{rule}` | {numbers} | {entry.citation} |")
    return "\n".join(lines) + "\n"


def _entry(group: str, strategy: Strategy, num_sublayers: int, dim: int) -> Entry:
    counted, problem = None, None
    try:
        counted = costs(strategy, num_sublayers, dim)
    except ConfigError as error:
        problem = str(error)
    return Entry(
        group=group,
        name=strategy.short_name,
        label=strategy.label,
        formula=strategy.formula,
        citation=strategy.citation,
        parameters=None if counted is None else counted.parameters,
        state=None if counted is None else counted.state,
        moved=None if counted is None else counted.moved,
        problem=problem,
        settings=dict(vars(strategy)),
    )
