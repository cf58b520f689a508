"""What was run, in words: settings, environment and what limits the reading of the numbers.

The configuration is whatever the run wrote; nothing here knows its keys, so that a new setting shows up in the report
by itself. Settings are told apart by whether the arms differ in them: that is what the comparison is about.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnres.analysis.depth_figures import mean_matrix
from attnres.analysis.numbers import DASH, decimal, whole
from attnres.analysis.runs import Arm, Comparison
from attnres.analysis.table import ArmRow

ABSENT = "not set"
"""Stands for a setting that a run does not have."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting across the arms."""

    key: str
    """Dotted name."""
    values: tuple[str, ...]
    """One text per arm; seeds that differ are listed."""
    shared: bool
    """Whether all arms have the same, seed by seed."""


def flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Turn nested settings into dotted names and texts."""
    flat: dict[str, str] = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return flat


def settings(comparison: Comparison) -> list[Setting]:
    """List all settings of all runs, in the order in which the runs wrote them."""
    arms = [arm for arm in comparison.arms if arm.runs]
    flat = [{seed: flatten(run.config) for seed, run in arm.runs.items()} for arm in arms]
    keys = dict.fromkeys(key for runs in flat for run in runs.values() for key in run)
    return [_setting(key, flat) for key in keys]


def _setting(key: str, arms: Sequence[Mapping[int, Mapping[str, str]]]) -> Setting:
    by_seed: dict[int, set[str]] = {}
    for runs in arms:
        for seed, run in runs.items():
            by_seed.setdefault(seed, set()).add(run.get(key, ABSENT))
    values = tuple(_distinct(run.get(key, ABSENT) for run in runs.values()) for runs in arms)
    return Setting(key=key, values=values, shared=all(len(texts) == 1 for texts in by_seed.values()))


def environments(comparison: Comparison) -> list[tuple[str, str]]:
    """List commit, versions, hardware and dates; what differs between runs is listed with all its values."""
    flat = [flatten(run.environment) for run in comparison.runs if run.environment]
    keys = dict.fromkeys(key for run in flat for key in run)
    return [(key, _span(key, [run.get(key, ABSENT) for run in flat])) for key in keys]


def _span(key: str, values: Sequence[str]) -> str:
    if key.endswith("date") and len(set(values)) > 1:
        return f"{min(values)} to {max(values)}"
    return _distinct(values)


def _distinct(values) -> str:
    return ", ".join(dict.fromkeys(values))


def caveats(comparison: Comparison, rows: Sequence[ArmRow]) -> list[str]:
    """Say what limits the reading of this comparison, one paragraph each; general limits after particular ones."""
    several, baseline = len(rows) > 1, comparison.baseline_arm
    lines = []
    if len(comparison.seeds) == 1:
        lines.append(
            "One seed. No interval can be given, and a difference of the size that another seed would make is noise."
        )
    if len({tokens for row in rows for tokens in row.tokens}) > 1:
        lines.append(
            "The finished runs saw different numbers of tokens, so their final losses are not matched in tokens."
        )
    lines += _environment_caveats(comparison)
    missing = [line for row in rows for line in row.unfinished]
    if missing:
        lines.append(f"Left out of the numbers: {'; '.join(missing)}.")
    if several and baseline is not None:
        lines.append(
            "At equal time a slower arm is cut off before its learning-rate schedule has ended, while the fastest run "
            "has finished its own: the comparison is unfavourable to the slower arm."
        )
        lines.append("Each interval covers its own difference with 95 %; they are not widened for several arms.")
    lines.append(
        "Times and speeds are wall-clock measurements. Runs follow one another, so a processor that warms up or is "
        "shared slows the later ones: differences of a few percent are not evidence."
    )
    return lines


def _environment_caveats(comparison: Comparison) -> list[str]:
    flat = [flatten(run.environment) for run in comparison.runs]
    differing = [
        key for key in dict.fromkeys(k for run in flat for k in run) if len({run.get(key) for run in flat}) > 1
    ]
    differing = [key for key in differing if not key.endswith("date")]
    lines = [f"The runs did not share one environment; these differ: {', '.join(differing)}."] if differing else []
    if any(run.get("dirty") == "true" for run in flat):
        lines.append("The code had uncommitted changes: the commit alone does not give the code that ran.")
    return lines


def findings(comparison: Comparison, rows: Sequence[ArmRow]) -> list[tuple[str, str]]:
    """Say in one sentence per arm how it compares with the baseline: (label, sentence)."""
    baseline = comparison.baseline_arm
    return [] if baseline is None else [(row.label, _finding(row, baseline.label)) for row in rows if row.difference]


def _finding(row: ArmRow, baseline: str) -> str:
    difference = row.difference
    assert difference is not None
    word = "lower" if difference.mean < 0 else "higher"
    text = f"final validation loss {decimal(abs(difference.mean))} nats per token {word} than {baseline}"
    if difference.interval is None:
        text += " (one seed, so it may be noise)"
    else:
        low, high = difference.interval
        text += f" (95 % interval of the difference {decimal(low)} to {decimal(high)}, {difference.pairs} seeds"
        text += "; it includes zero, so no difference is shown)" if low <= 0 <= high else ")"
    return text + (f", at {row.speed_ratio:.3f} times its tokens per second." if row.speed_ratio is not None else ".")


@dataclass(frozen=True, kw_only=True)
class DepthSummary:
    """How one arm spreads its reads, as shares of each read's total weight, averaged over the sites."""

    label: str
    """Name of the arm."""
    embedding: str
    """Share of the embedding."""
    newest: str
    """Share of the newest sublayer's output."""
    evenness: str
    """Effective number of sources (exponential of the entropy) over the number of sources; 1 is an even mix."""


def depth_summary(arm: Arm) -> DepthSummary:
    """Summarise the mixing matrix of an arm; sites with a single source, where there is no choice, are left out."""
    matrix = np.abs(mean_matrix(arm.depths))[1:]
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    sources = np.arange(2, len(matrix) + 2)
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=1)
    return DepthSummary(
        label=arm.label,
        embedding=decimal(float(shares[:, 0].mean()), 3),
        newest=decimal(float(np.diagonal(shares, offset=1).mean()), 3),
        evenness=decimal(float((np.exp(entropy) / sources).mean()), 3),
    )


def size_line(comparison: Comparison, rows: Sequence[ArmRow]) -> str:
    """Say how large the comparison is: arms, seeds, tokens, model."""
    parts = []
    if comparison.baseline is not None:
        parts.append(f"{_count(len(rows), 'arm')} \u00d7 {_count(len(comparison.seeds), 'seed')}")
    tokens = sorted({tokens for row in rows for tokens in row.tokens})
    if tokens:
        parts.append(f"{_range(tokens)} training tokens per run")
    base = sorted({row.parameters - (row.extra_parameters or 0) for row in rows if row.parameters is not None})
    if base:
        parts.append(f"{_range(base)} parameters without those of the residual strategy")
    return " \u00b7 ".join(parts) or DASH


def _count(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def _range(values: Sequence[int]) -> str:
    return whole(values[0]) if len(values) == 1 else f"{whole(values[0])} to {whole(values[-1])}"
