"""One figure: cost of all reads against depth."""

import io
from collections.abc import Sequence
from pathlib import Path

from attnres.bench.machine import Machine
from attnres.bench.phases import AUTO, FULL, ONE, PRENORM, TWO, PhaseRow

_STYLES = {
    PRENORM: {"color": "#6b7280", "linestyle": "-"},
    ONE: {"color": "#0072b2", "linestyle": "-"},
    TWO: {"color": "#d55e00", "linestyle": "-"},
    AUTO: {"color": "#009e73", "linestyle": "--"},
    FULL: {"color": "#cc79a7", "linestyle": "-"},
}


def draw_depth(rows: Sequence[PhaseRow], machine: Machine, path: Path) -> None:
    """Write an SVG with one panel per direction: milliseconds over sublayers, one line per arm, quartiles as a band."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "attnres", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        for axes, direction in zip(figure.subplots(1, 2), ("forward", "forward+backward"), strict=True):
            _panel(axes, [row for row in rows if row.direction == direction], direction)
        figure.suptitle(_title(rows[0], machine), fontsize=10)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n", encoding="utf-8")


def _panel(axes, rows: Sequence[PhaseRow], direction: str) -> None:
    for arm, style in _STYLES.items():
        points = sorted((row.sublayers, row.median_ms, row.low_ms, row.high_ms) for row in rows if row.arm == arm)
        if points:
            depths, medians, lows, highs = zip(*points, strict=True)
            axes.plot(depths, medians, marker="o", markersize=4, label=arm, **style)
            axes.fill_between(depths, lows, highs, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_title(direction.replace("+", " + "), fontsize=10)
    axes.set_xlabel("sublayers")
    axes.set_ylabel("all reads and writes, ms")
    axes.set_xticks(sorted({row.sublayers for row in rows}))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(color="#d7dde3", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)


def _title(row: PhaseRow, machine: Machine) -> str:
    size = f"{row.blocks} blocks, {row.tokens} tokens x {row.dim}, {row.dtype}"
    where = f"{machine.processor}, {machine.threads} threads" if machine.device == "cpu" else machine.processor
    return f"{size}; {where}, torch {machine.torch}, {machine.date[:10]}"
