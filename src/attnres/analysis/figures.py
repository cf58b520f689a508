"""Figures of a comparison over training: loss against tokens, and loss against seconds.

Each function takes what was read and returns one SVG. The interesting differences between arms are small against the
first drop of the loss, so the axis is fitted to what comes after it, and the paired difference to the baseline has
a panel of its own.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnres.analysis.curves import Band, band, smooth, thin
from attnres.analysis.runs import Arm, Array, Comparison, Run
from attnres.analysis.svg import INK, ArmStyle, arm_styles, drawing, to_svg
from attnres.analysis.table import matched_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 8.8
"""Width of a full figure in inches."""

FOCUS = 0.1
"""The loss axis is fitted to what comes after this share of the run."""

SMOOTHING = 0.02
"""The training loss is averaged over this share of its records."""

LEGEND_ROW = 0.21
"""Height of one row of a legend in inches."""

_MOST_POINTS = 400


def loss_curves(comparison: Comparison, *, key: str = "loss") -> str:
    """Draw training and validation loss against training tokens, and below the paired difference to the baseline."""
    styles = arm_styles(comparison)
    scale, unit = token_unit(comparison)
    paired = len(comparison.arms) > 1
    with drawing(WIDTH, 5.9 if paired else 3.9) as figure:
        upper, lower = _panels(figure, paired)
        shown = []
        for arm in comparison.arms:
            runs, style = list(arm.shown.values()), styles[arm.name]
            training = band([_training(run, scale) for run in runs])
            upper.plot(*thin(training.x, training.mean, _MOST_POINTS), color=style.color, linewidth=0.9, alpha=0.55)
            validation = band([(run.valid.tokens / scale, run.valid.loss) for run in runs])
            _draw_band(upper, validation, style)
            shown += [training, validation]
        fit_axis(upper, shown)
        upper.set_ylabel("loss (nats per token)", rotation_mode="anchor")
        if lower is not None:
            _draw_differences(lower, comparison, styles, scale)
        (upper if lower is None else lower).set_xlabel(f"training tokens ({unit})")
        add_legend(figure, comparison.arms, styles, _loss_handles())
        return to_svg(figure, key=key, title="Training and validation loss against training tokens")


def loss_over_time(comparison: Comparison, *, key: str = "loss-over-time") -> str:
    """Draw validation loss against training time, with the time at which the table compares the arms."""
    styles = arm_styles(comparison)
    scale, unit = _time_unit(comparison)
    with drawing(WIDTH, 3.9) as figure:
        axes = figure.subplots()
        shown = []
        for arm in comparison.arms:
            shown.append(band([(run.valid.seconds / scale, run.valid.loss) for run in arm.shown.values()]))
            _draw_band(axes, shown[-1], styles[arm.name])
        fit_axis(axes, shown)
        seconds = matched_seconds(comparison)
        if seconds is not None and len(comparison.arms) > 1:
            axes.axvline(seconds / scale, color=INK, linewidth=1, linestyle=(0, (4, 3)), gid="equal-time")
        axes.set_ylabel("validation loss (nats per token)", rotation_mode="anchor")
        axes.set_xlabel(f"training time ({unit})")
        extra = [(_line(linestyle=(0, (4, 3)), linewidth=1), "equal time of the table")] if seconds else []
        add_legend(figure, comparison.arms, styles, extra if len(comparison.arms) > 1 else [])
        return to_svg(figure, key=key, title="Validation loss against training time")


def _panels(figure: "Figure", paired: bool) -> "tuple[Axes, Axes | None]":
    if not paired:
        return figure.subplots(), None
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    return upper, lower


def _training(run: Run, scale: float) -> tuple[Array, Array]:
    window = max(1, round(SMOOTHING * len(run.train)))
    return run.train.tokens / scale, smooth(run.train.loss, window)


def _draw_band(axes: "Axes", mean: Band, style: ArmStyle) -> None:
    marker = "o" if len(mean.x) <= 40 else ""
    axes.plot(mean.x, mean.mean, color=style.color, linestyle=style.linestyle, marker=marker, markersize=3.6)
    axes.fill_between(mean.x, mean.low, mean.high, color=style.color, alpha=0.18, linewidth=0)


def _draw_differences(axes: "Axes", comparison: Comparison, styles: dict[str, ArmStyle], scale: float) -> None:
    shown = []
    for arm in comparison.arms:
        if arm is not comparison.baseline_arm:
            shown.append(paired_band(arm, comparison.baseline_arm, scale))
            _draw_band(axes, shown[-1], styles[arm.name])
    axes.axhline(0, color=styles[comparison.baseline].color if comparison.baseline else INK, linewidth=1.4)
    fit_axis(axes, shown, include_zero=True)
    axes.set_ylabel("difference to\nbaseline (nats)", rotation_mode="anchor")


def paired_band(arm: Arm, baseline: Arm | None, scale: float = 1.0) -> Band:
    """Average the validation loss minus the baseline's over the seeds that both have."""
    others = {} if baseline is None else baseline.shown
    return band([_difference(run, others[seed], scale) for seed, run in arm.shown.items() if seed in others])


def _difference(run: Run, other: Run, scale: float) -> tuple[Array, Array]:
    if not len(run.valid) or not len(other.valid):
        return np.empty(0), np.empty(0)
    inside = (run.valid.tokens >= other.valid.tokens[0]) & (run.valid.tokens <= other.valid.tokens[-1])
    tokens = run.valid.tokens[inside]
    return tokens / scale, run.valid.loss[inside] - np.interp(tokens, other.valid.tokens, other.valid.loss)


def fit_axis(axes: "Axes", bands: Sequence[Band], *, include_zero: bool = False) -> None:
    """Fit the vertical axis to what comes after the first :data:`FOCUS` of the run, all bands together."""
    values = [0.0] if include_zero else []
    for curve in (each for each in bands if len(each.x)):
        late = curve.x >= curve.x[0] + FOCUS * (curve.x[-1] - curve.x[0])
        values += [float(v) for part in (curve.low, curve.high) for v in part[late] if np.isfinite(v)]
    axes.margins(x=0.02)
    if values and max(values) > min(values):
        pad = 0.07 * (max(values) - min(values))
        axes.set_ylim(min(values) - pad, max(values) + pad)
    plain_ticks(axes)


def token_unit(comparison: Comparison) -> tuple[float, str]:
    """Choose the unit of a token axis: its size in tokens and its name."""
    most = max([0.0, *(each.tokens[-1] for run in comparison.runs for each in (run.train, run.valid) if len(each))])
    units = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
    return next(((size, name) for size, name in units if most >= 2 * size), (1.0, "tokens"))


def _time_unit(comparison: Comparison) -> tuple[float, str]:
    longest = max([0.0, *(run.valid.seconds[-1] for run in comparison.runs if len(run.valid))])
    units = ((3600.0, "hours"), (60.0, "minutes"))
    return next(((size, name) for size, name in units if longest >= 3 * size), (1.0, "seconds"))


def plain_ticks(axes: "Axes") -> None:
    """Write the ticks of a linear axis in full, all with the same digits and without an offset above the axis."""
    from matplotlib.ticker import ScalarFormatter

    formatter = ScalarFormatter(useOffset=False)
    formatter.set_scientific(False)
    axes.yaxis.set_major_formatter(formatter)


def add_legend(
    figure: "Figure", arms: Sequence[Arm], styles: Mapping[str, ArmStyle], extra: Sequence[tuple[Any, str]] = ()
) -> None:
    """Put the arms, then the extra entries, above the panels, where they cover nothing; the figure grows by them."""
    entries = [(_line(color=styles[a.name].color, linestyle=styles[a.name].linestyle), _name(a)) for a in arms]
    entries += extra
    if not entries:
        return
    columns = _columns([label for _, label in entries])
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * (math.ceil(len(entries) / columns) - 1))
    # matplotlib fills a legend column by column; readers expect the order of the table row by row
    ordered = [entry for start in range(columns) for entry in entries[start::columns]]
    handles, labels = zip(*ordered, strict=True)
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, columnspacing=1.6)


def _name(arm: Arm) -> str:
    return arm.label + ("" if arm.finished else " (unfinished)" if arm.runs else " (not started)")


def _columns(labels: Sequence[str]) -> int:
    """Return how many entries fit side by side, so that a long legend grows downwards and not out of the page."""
    for columns in range(len(labels), 1, -1):
        widths = [max(len(label) for label in labels[start::columns]) + 7 for start in range(columns)]
        if sum(widths) <= 12 * WIDTH:
            return columns
    return 1


def _line(**style: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], **{"color": INK, **style})


def _loss_handles() -> list[tuple[Any, str]]:
    return [
        (_line(marker="o", markersize=3.6), "validation"),
        (_line(linewidth=0.9, alpha=0.55), "training, smoothed"),
    ]
