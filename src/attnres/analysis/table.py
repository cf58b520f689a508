"""The comparison table: one row per arm, the same columns in the terminal, in Markdown, in JSON and in the report.

Numbers are computed once, in :func:`comparison_table`; the rest only writes them down. A number that cannot be given,
such as an interval from one seed, is shown as a dash and the reason is among the notes.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from attnres.analysis.numbers import DASH, decimal, exact_duration, memory, signed, whole
from attnres.analysis.runs import Arm, Comparison, RunResult
from attnres.analysis.statistics import PairedDifference, loss_at_seconds, paired_difference, paired_ratio

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class ArmRow:
    """One arm of a comparison in numbers; ``None`` where a number cannot be given."""

    arm: str
    """Short name of the arm."""
    label: str
    """Name for readers."""
    is_baseline: bool
    """Whether the differences and ratios of the other rows refer to this one."""
    seeds: tuple[int, ...]
    """Seeds of all runs that were asked for."""
    finished_seeds: tuple[int, ...]
    """Seeds of the finished runs; only these enter the numbers."""
    valid_loss: float | None
    """Final validation loss in nats per token, mean over seeds."""
    bits_per_byte: float | None
    """Final validation loss in bits per byte of text, mean over seeds."""
    difference: PairedDifference | None
    """Final validation loss minus the baseline's, paired by seed."""
    matched_seconds: float | None
    """Training time at which the arms are compared: the shortest total time of any finished run."""
    matched_loss: float | None
    """Validation loss at ``matched_seconds``, interpolated linearly, mean over seeds."""
    matched_difference: PairedDifference | None
    """The same minus the baseline's, paired by seed."""
    tokens: tuple[int, ...]
    """Training tokens of the finished runs, each value once."""
    tokens_per_second: float | None
    """Training speed, median over seeds."""
    speed_ratio: float | None
    """Training speed as a ratio to the baseline's, paired by seed, median over seeds."""
    parameters: int | None
    """Parameters of the model."""
    extra_parameters: int | None
    """Parameters that the residual strategy added."""
    peak_memory_bytes: int | None
    """Peak memory, the largest over seeds."""
    unfinished: tuple[str, ...]
    """One line for every run that is not finished or not there."""
    jobs: int = 1
    """Runs that shared the machine at a time; more than one distorts what is measured in seconds."""


def comparison_table(comparison: Comparison) -> list[ArmRow]:
    """Compute one row per arm, in the order of the comparison."""
    seconds = matched_seconds(comparison)
    return [_row(comparison, arm, seconds) for arm in comparison.arms]


def matched_seconds(comparison: Comparison) -> float | None:
    """Return the training time at which arms are compared, or ``None`` if no run is finished.

    It is the shortest total time of any finished run, so that every finished curve reaches it.
    """
    ends = [run.valid.seconds[-1] for arm in comparison.arms for run in arm.finished.values() if len(run.valid)]
    return float(min(ends)) if ends else None


def _row(comparison: Comparison, arm: Arm, seconds: float | None) -> ArmRow:
    baseline = comparison.baseline_arm
    others = None if baseline is None or baseline is arm else baseline
    results = _results(arm)
    final, speed, matched = _final_loss(arm), _speed(arm), _matched_loss(arm, seconds)
    return ArmRow(
        arm=arm.name,
        label=arm.label,
        is_baseline=arm is baseline,
        seeds=comparison.seeds,
        finished_seeds=tuple(results),
        valid_loss=_mean(final.values()),
        bits_per_byte=_mean([r.bits_per_byte for r in results.values() if r.bits_per_byte is not None]),
        difference=paired_difference(final, _final_loss(others)) if others else None,
        matched_seconds=seconds,
        matched_loss=_mean(matched.values()),
        matched_difference=paired_difference(matched, _matched_loss(others, seconds)) if others else None,
        tokens=tuple(sorted({result.tokens for result in results.values()})),
        tokens_per_second=median(speed.values()) if speed else None,
        speed_ratio=paired_ratio(speed, _speed(baseline)) if baseline else None,
        parameters=_largest(result.parameters for result in results.values()),
        extra_parameters=_largest(result.extra_parameters for result in results.values()),
        peak_memory_bytes=_largest(r.peak_memory_bytes for r in results.values() if r.peak_memory_bytes is not None),
        unfinished=_unfinished(arm),
        jobs=comparison.jobs,
    )


def _results(arm: Arm) -> dict[int, RunResult]:
    return {seed: run.result for seed, run in arm.runs.items() if run.result is not None}


def _final_loss(arm: Arm) -> dict[int, float]:
    return {seed: result.valid_loss for seed, result in _results(arm).items()}


def _speed(arm: Arm) -> dict[int, float]:
    return {seed: result.tokens_per_second for seed, result in _results(arm).items()}


def _matched_loss(arm: Arm, seconds: float | None) -> dict[int, float]:
    if seconds is None:
        return {}
    losses = {seed: loss_at_seconds(run.valid, seconds) for seed, run in arm.finished.items()}
    return {seed: loss for seed, loss in losses.items() if loss is not None}


def _mean(values) -> float | None:
    values = list(values)
    return fmean(values) if values else None


def _largest(values) -> int | None:
    return max(values, default=None)


def _unfinished(arm: Arm) -> tuple[str, ...]:
    stopped = [f"{run.name}: {run.status}" for run in arm.runs.values() if run.result is None]
    return (*stopped, *(f"{name}: not started (no such folder)" for name in arm.absent))


# ---- the same columns in every form


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the table as readers see it."""

    title: str
    """Heading."""
    unit: str = ""
    """Unit or explanation below the heading; the narrow table of a terminal leaves it out."""
    cell: Callable[[ArmRow], str]
    """Writes the number of a row."""
    compares: bool = False
    """Whether the column says nothing without a baseline, as for a lone run."""


COLUMNS = (
    Column(title="arm", cell=lambda row: row.label + (" (baseline)" if row.is_baseline else "")),
    Column(title="runs", unit="finished", cell=lambda row: _finished(row)),
    Column(title="valid. loss", unit="nats/token", cell=lambda row: decimal(row.valid_loss)),
    Column(title="diff.", unit="\u00b1 95 %", cell=lambda row: _difference(row, row.difference), compares=True),
    Column(title="at equal time", unit="nats/token", cell=lambda row: decimal(row.matched_loss), compares=True),
    Column(title="diff.", unit="\u00b1 95 %", cell=lambda row: _difference(row, row.matched_difference), compares=True),
    Column(title="tokens per s", unit="median", cell=lambda row: whole(row.tokens_per_second)),
    Column(title="speed ratio", unit="\u00f7 baseline", cell=lambda row: _ratio(row.speed_ratio), compares=True),
    Column(title="extra param.", unit="of all", cell=lambda row: _extra(row)),
    Column(title="peak memory", cell=lambda row: memory(row.peak_memory_bytes)),
)
"""All columns of the table, in order."""


def columns_for(rows: Sequence[ArmRow]) -> list[Column]:
    """Return the columns that say something about these rows."""
    compared = any(row.is_baseline for row in rows)
    return [column for column in COLUMNS if compared or not column.compares]


def folded_cells(row: ArmRow, columns: Sequence[Column]) -> list[list[str]]:
    """Write one row with what qualifies a number on a line of its own, for narrow places."""
    name, *numbers = (column.cell(row) for column in columns)
    return [[name], *(re.split(r" (?=[(\u00b1])", cell) for cell in numbers)]


def table_notes(rows: Sequence[ArmRow]) -> list[str]:
    """Say how the columns are defined and what is missing, one sentence or two per note."""
    missing = [line for row in rows for line in row.unfinished]
    if not any(row.is_baseline for row in rows):
        return ["Losses are in nats per token.", *missing]  # a lone run is compared with nothing
    notes = [
        "Losses are in nats per token, means over seeds of the finished runs. A difference is arm minus baseline, "
        "paired by seed, \u00b1 half the width of its 95 % interval (Student t over seeds). Below zero is better.",
    ]
    seconds = next((row.matched_seconds for row in rows if row.matched_seconds is not None), None)
    if seconds is not None:
        notes.append(
            f"At equal time: validation loss after {exact_duration(seconds)} of training, the shortest total time of "
            "any finished run, interpolated linearly between evaluations."
        )
    jobs = max(row.jobs for row in rows)
    if jobs > 1:
        notes.append(
            f"{jobs} runs at a time shared the machine: speeds, ratios and losses at equal time say as much about a "
            "run's neighbours as about its arm."
        )
    if any(row.difference is not None and row.difference.half_width is None for row in rows):
        notes.append(f"One seed has no interval ({DASH}): the difference may be noise.")
    return notes + missing


def render_table(rows: Sequence[ArmRow]) -> "Table":
    """Build the table for the terminal, with the notes as its caption."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    caption = Text("\n".join(f"\u2022 {note}" for note in table_notes(rows)))
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", padding=0, pad_edge=False)
    columns = columns_for(rows)
    lines = [[re.sub(" ([MG]iB)", r"\n\1", "\n".join(cell)) for cell in folded_cells(row, columns)] for row in rows]
    for index, column in enumerate(columns):
        title = column.title.replace(" ", "\n")
        longest = max(len(line) for text in (title, *(line[index] for line in lines)) for line in text.split("\n"))
        # rich shortens what does not fit; a number must never be shortened, a label may be wrapped
        table.add_column(Text(title), justify="right" if index else "left", min_width=longest if index else 10)
    for row, line in zip(rows, lines, strict=True):
        table.add_row(*(Text(text) for text in line), style="bold" if row.is_baseline else "")
    return table


def markdown_table(rows: Sequence[ArmRow]) -> str:
    """Write the table and its notes as Markdown."""
    columns = columns_for(rows)
    titles = [f"{column.title} ({column.unit})" if column.unit else column.title for column in columns]
    lines = [titles, ["---"] + ["---:"] * (len(columns) - 1), *([c.cell(row) for c in columns] for row in rows)]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return table + "\n\n" + "\n".join(f"- {note}" for note in table_notes(rows)) + "\n"


def table_json(rows: Sequence[ArmRow]) -> str:
    """Write the rows as JSON with full precision; what is not finite becomes ``null``."""
    return json.dumps([_plain(dataclasses.asdict(row)) for row in rows], indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _finished(row: ArmRow) -> str:
    done, asked = len(row.finished_seeds), len(row.seeds)
    return str(done) if done == asked else f"{done} of {asked}"


def _difference(row: ArmRow, difference: PairedDifference | None) -> str:
    if difference is None:
        return "" if row.is_baseline else DASH
    half = DASH if difference.half_width is None else decimal(difference.half_width)
    return f"{signed(difference.mean)} \u00b1 {half}"


def _ratio(ratio: float | None) -> str:
    return DASH if ratio is None else f"{ratio:.3f}\u00d7"


def _extra(row: ArmRow) -> str:
    if row.extra_parameters is None or not row.parameters:
        return DASH
    if row.extra_parameters == 0:
        return "0"
    share = 100 * row.extra_parameters / row.parameters
    return f"{row.extra_parameters:,} ({share:.2g} %)"
