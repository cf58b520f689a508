"""Figures along depth: magnitudes per sublayer, and who reads whom.

Each function takes what was read and returns one SVG. Sublayers count from 1, as in the paper; source 0 is the token
embedding. Weights of different strategies are not on one scale (a residual sum has ones, a softmax sums to one, and
``read_scale="sum"`` multiplies by the number of sources), so the mixing matrix is shown relative to an even mix.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnres.analysis.figures import WIDTH, add_legend, plain_ticks
from attnres.analysis.runs import Arm, Array, Comparison, Depth
from attnres.analysis.svg import INK, PAGE, arm_styles, drawing, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOG_FROM = 20.0
"""An axis is logarithmic if its largest value is at least this many times its smallest."""

BOUNDARY_COLOR = "#111418"
"""Of what is drawn on the cells, which are as light on a dark page as on a light one."""

_KIND_NAMES = {"mlp": "MLP", "moe": "MoE"}

_MARKERS = ("o", "s", "D", "^", "v")


def output_magnitude(comparison: Comparison, *, key: str = "output-magnitude") -> str:
    """Draw the root mean square of each sublayer's output."""
    title = "Magnitude of each sublayer's output"
    return _per_sublayer(comparison, lambda depth: depth.output_magnitude, "RMS of the output", key, title)


def gradient_magnitude(comparison: Comparison, *, key: str = "gradient-magnitude") -> str:
    """Draw the root mean square of the loss gradient at each sublayer's output."""
    title = "Magnitude of the loss gradient at each sublayer's output"
    return _per_sublayer(comparison, lambda depth: depth.gradient_magnitude, "RMS of the gradient", key, title)


def input_magnitude(comparison: Comparison, *, key: str = "input-magnitude") -> str:
    """Draw the root mean square of what each site reads, the output read last."""
    title = "Magnitude of what each sublayer and the output read"
    return _per_sublayer(comparison, lambda depth: depth.input_magnitude, "RMS of the read", key, title)


def mixing_matrix(comparison: Comparison, arm: Arm, *, key: str = "mixing") -> str:
    """Draw which sources each site of one arm reads, relative to an even mix, with the block boundaries."""
    from matplotlib.colors import LogNorm

    depths = arm.depths
    matrix, limit = relative_weights(mean_matrix(depths)), color_limit(comparison)
    with drawing(4.8, 4.7) as figure:
        axes = figure.subplots()
        axes.grid(visible=False)
        norm = LogNorm(1 / limit, limit, clip=True)
        # the picture keeps one pixel per cell and is not smoothed: a vector cell each would be a thousand paths
        image = axes.imshow(matrix, cmap="PuOr_r", norm=norm, interpolation="none", aspect="equal", origin="upper")
        _outline(axes, len(matrix))
        _mark_boundaries(axes, boundaries(depths[0]), len(matrix))
        _mark_negative(axes, mean_matrix(depths))
        _matrix_ticks(axes, depths[0].num_sublayers)
        _colorbar(axes, image, limit)
        return to_svg(figure, key=key, title=f"Mixing matrix of {arm.label}")


def mean_matrix(depths: Sequence[Depth]) -> Array:
    """Average the mixing matrix over the seeds of an arm."""
    return np.mean([depth.mixing_matrix for depth in depths], axis=0)


def relative_weights(matrix: Array) -> Array:
    """Divide each weight by what an even mix would give it: ``|w| * sources / sum |w|`` along each row.

    An even mix, such as the plain residual sum, is 1 everywhere, whatever the scale of the weights. A site cannot read
    the sublayers after it: there the result is NaN.
    """
    size = np.abs(matrix)
    sources = np.arange(1, len(matrix) + 1)[:, None]
    total = size.sum(axis=1, keepdims=True)
    relative = size * sources / np.where(total > 0, total, 1.0)
    relative[np.triu_indices(len(matrix), k=1)] = np.nan
    return relative


def color_limit(comparison: Comparison) -> float:
    """Return the end of the colour scale, a power of two from 2 to 32, the same for all arms of a report."""
    most = 1.0
    for arm in comparison.arms:
        if arm.depths:
            relative = relative_weights(mean_matrix(arm.depths))
            most = max(most, float(relative[np.isfinite(relative)].max(initial=1.0)))
    return float(min(32.0, max(2.0, 2.0 ** math.ceil(math.log2(most) - 1e-9))))


def boundaries(depth: Depth) -> tuple[int, ...]:
    """Return the sublayer counts at which a line is drawn: ends of blocks inside the model.

    The end of the last block is the edge of the matrix. If every block is one sublayer, there is nothing to group.
    """
    inside = tuple(end for end in depth.block_ends if end < depth.num_sublayers)
    lengths = {b - a for a, b in zip((0, *inside), (*inside, depth.num_sublayers), strict=True)}
    return () if lengths == {1} else inside


def _per_sublayer(comparison: Comparison, values: Callable[[Depth], Array], label: str, key: str, title: str) -> str:
    styles, measured = arm_styles(comparison), [arm for arm in comparison.arms if arm.depths]
    with drawing(WIDTH, 3.7) as figure:
        axes = figure.subplots()
        kinds: dict[str, str] = {}
        everything, longest = [], 0
        for arm in measured:
            stack = np.stack([values(depth) for depth in arm.depths])
            x = np.arange(1, stack.shape[1] + 1)
            style = styles[arm.name]
            axes.plot(x, stack.mean(axis=0), color=style.color, linestyle=style.linestyle, linewidth=1.4)
            axes.fill_between(x, stack.min(axis=0), stack.max(axis=0), color=style.color, alpha=0.18, linewidth=0)
            _mark_kinds(axes, arm.depths[0], stack.mean(axis=0), style.color, kinds)
            everything.append(stack.ravel())
            longest = max(longest, len(x))
        _magnitude_axis(axes, np.concatenate(everything or [np.empty(0)]))
        last_is_output = longest > max([0, *(depth.num_sublayers for arm in measured for depth in arm.depths)])
        _sublayer_ticks(axes, longest, last_is_output)
        axes.set_xlabel("sublayer that reads (out = output read)" if last_is_output else "sublayer")
        axes.set_ylabel(label, rotation_mode="anchor")
        marks = [(_marker(mark), _KIND_NAMES.get(kind, kind)) for kind, mark in kinds.items()]
        add_legend(figure, measured, styles, marks)
        return to_svg(figure, key=key, title=title)


def _mark_kinds(axes: "Axes", depth: Depth, mean: Array, color: str, kinds: dict[str, str]) -> None:
    """Mark each sublayer by its kind: filled for the first kind, open for the others."""
    names = np.array([*depth.sublayers, "output read"][: len(mean)])
    size = float(np.clip(170 / len(mean), 1.8, 5.0))
    for kind in dict.fromkeys(names.tolist()):
        mark = kinds.setdefault(kind, _MARKERS[len(kinds) % len(_MARKERS)])
        at = np.flatnonzero(names == kind)
        face = color if mark == _MARKERS[0] else PAGE
        style = {"marker": mark, "markersize": size, "markerfacecolor": face, "markeredgecolor": color}
        axes.plot(at + 1, mean[at], linestyle="", markeredgewidth=1.1, **style)


def _marker(mark: str) -> Any:
    from matplotlib.lines import Line2D

    face = INK if mark == _MARKERS[0] else PAGE
    return Line2D([], [], linestyle="", marker=mark, markersize=5, markerfacecolor=face, markeredgecolor=INK)


def _magnitude_axis(axes: "Axes", values: Array) -> None:
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0 and values.max() >= LOG_FROM * values.min():
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_yscale("log")
        few = values.max() < 1000 * values.min()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        return
    plain_ticks(axes)
    if len(values) and 0 < np.abs(values).max() < 1e-3:  # six zeros in a label tell nobody anything
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if len(values) and values.min() >= 0:
        axes.set_ylim(0, 1.07 * values.max() or 1.0)


def tick_step(count: int, most: int) -> int:
    """Return the smallest step among 1, 2, 4, 8, ... that leaves at most this many ticks."""
    step = 1
    while count / step > most:
        step *= 2
    return step


def _sublayer_ticks(axes: "Axes", count: int, last_is_output: bool) -> None:
    sublayers = count - last_is_output
    step = tick_step(sublayers, 32)
    ticks = [tick for tick in range(1, sublayers + 1) if tick == 1 or tick % step == 0]
    labels = [str(tick) for tick in ticks]
    if last_is_output:
        ticks = [tick for tick in ticks if count - tick >= max(0.6 * step, count / 24) or tick == 1]
        labels = [*map(str, ticks), "out"]
        ticks = [*ticks, count]
    axes.set_xticks(ticks, labels)
    axes.grid(visible=False, axis="x")
    axes.margins(x=0.02)


# ---- parts of the mixing matrix


def _outline(axes: "Axes", size: int) -> None:
    """Draw the stairs along the diagonal: no source beyond them exists when the site reads."""
    x, y = [-0.5], [-0.5]
    for row in range(size):
        x += [row + 0.5, row + 0.5]
        y += [row - 0.5, row + 0.5]
    axes.plot(x, y, color=INK, linewidth=0.6, gid="stairs")
    axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5))


def _mark_boundaries(axes: "Axes", ends: Sequence[int], size: int) -> None:
    """Draw a block's end as a corner: right of its last source, and above the first site of the next block."""
    style = {"color": BOUNDARY_COLOR, "linewidth": 1.2, "linestyle": "-", "solid_capstyle": "butt"}
    for end in ends:
        axes.plot([end + 0.5, end + 0.5], [end - 0.5, size - 0.5], gid=f"source-boundary-{end}", **style)
        axes.plot([-0.5, end + 0.5], [end - 0.5, end - 0.5], gid=f"site-boundary-{end}", **style)


def _mark_negative(axes: "Axes", matrix: Array) -> None:
    rows, columns = np.nonzero(matrix < 0)
    if len(rows):
        axes.plot(columns, rows, linestyle="", marker="_", markersize=4, color=BOUNDARY_COLOR, gid="negative")


def _matrix_ticks(axes: "Axes", sublayers: int) -> None:
    step = tick_step(sublayers, 9)
    inner = [tick for tick in range(step, sublayers, step) if sublayers - tick >= 0.75 * step]
    axes.set_xticks([0, *inner, sublayers], ["emb", *map(str, [*inner, sublayers])])
    sites = [site for site in (1, *inner) if site == 1 or site > 1]
    axes.set_yticks([*(site - 1 for site in sites), sublayers], [*map(str, sites), "out"])
    axes.set_xlabel("source: embedding, output of sublayer")
    axes.set_ylabel("site: input of sublayer, output", rotation_mode="anchor")
    axes.tick_params(length=2.5)


def _colorbar(axes: "Axes", image: Any, limit: float) -> None:
    """Put the colour scale into the corner above the diagonal, which is always empty."""
    powers = range(-round(math.log2(limit)), round(math.log2(limit)) + 1)
    shown = [power for power in powers if len(powers) <= 7 or power % 2 == 0]
    place = axes.inset_axes((0.53, 0.9, 0.45, 0.035))
    bar = axes.figure.colorbar(image, cax=place, orientation="horizontal", ticks=[2.0**power for power in shown])
    bar.ax.minorticks_off()
    bar.set_ticklabels([str(2**power) if power >= 0 else f"1/{2**-power}" for power in shown])
    bar.ax.tick_params(length=2.5, labelsize=8.5)
    bar.ax.set_title("weight \u00f7 even mix", fontsize=9.5, pad=4)
    bar.outline.set_linewidth(0.6)
