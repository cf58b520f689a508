"""From a matplotlib figure to an SVG that can stand in one page with others: style, colours, unique ids.

Matplotlib numbers the ids of every figure from one, stamps the date and fixes colours. A page with several figures
needs ids that do not clash, a rebuild should be byte-identical, and a dark page needs other inks. So the SVG is written
with a fixed salt and without a date, every id gets the figure's key in front, and the colours of inks and arms become
CSS variables with the light colour as fallback, which keeps a single saved figure readable too.

No display and no pyplot: figures are plain objects that do not outlive the call.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import quoteattr

from attnres.analysis.runs import Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, GRID, PAGE = "#24292f", "#d7dde3", "#fffffe"
"""Text and axes, grid lines, and the page behind the figure, as drawn on a light page."""

BASELINE_COLOR = "#6b7280"
"""A neutral grey: the arm the others are measured against."""

ARM_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#4aa3df")
"""Colours of the other arms: told apart with every common kind of colour blindness (after Okabe and Ito)."""

_VARIABLES = {
    INK: "--ink",
    GRID: "--grid",
    PAGE: "--page",
    BASELINE_COLOR: "--arm-0",
    **{color: f"--arm-{index}" for index, color in enumerate(ARM_COLORS, start=1)},
}

_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
    "font.size": 10.5,
    "axes.titlesize": 10.5,
    "axes.labelsize": 10.5,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "legend.fontsize": 10,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True, kw_only=True)
class ArmStyle:
    """How one arm is drawn in every figure of a report."""

    color: str
    """Line colour."""
    linestyle: str
    """Solid; dashed once the colours are used up."""


def arm_styles(comparison: Comparison) -> dict[str, ArmStyle]:
    """Give every arm its colour: grey to the baseline, the rest in order."""
    others = [arm.name for arm in comparison.arms if arm.name != comparison.baseline]
    styles = {
        name: ArmStyle(color=ARM_COLORS[i % len(ARM_COLORS)], linestyle=("-", "--", ":")[i // len(ARM_COLORS) % 3])
        for i, name in enumerate(others)
    }
    if comparison.baseline is not None:
        styles[comparison.baseline] = ArmStyle(color=BASELINE_COLOR, linestyle="-")
    return styles


@contextmanager
def drawing(width: float, height: float) -> Iterator["Figure"]:
    """Give an empty figure of this size in inches; the house style holds while it is drawn and written."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", _STYLE]):
        yield Figure(figsize=(width, height), layout="constrained")


def to_svg(figure: "Figure", *, key: str, title: str) -> str:
    """Write a figure as one ``<svg>`` element, the same bytes every time.

    Args:
        figure: Drawn inside :func:`drawing`, and still inside it.
        key: Starts every id; letters, digits and hyphens, different for every figure of a page.
        title: What a screen reader says of the figure.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": key}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{key}-", svg)
    svg = svg.replace('<style type="text/css">*{', f'<style type="text/css">#{key} *{{')
    svg = re.sub(r"(fill|stroke): (#[0-9a-f]{6})", _themed, svg)
    svg = re.sub(r"\n\s*\n", "\n", svg)
    return svg.replace("<svg ", f'<svg id="{key}" role="img" aria-label={quoteattr(title)} ', 1).strip()


def _themed(match: re.Match[str]) -> str:
    use, color = match.groups()
    return f"{use}: {css_color(color)}" if color in _VARIABLES else match.group(0)


def css_color(color: str) -> str:
    """Return the CSS value that follows the page's light or dark colours."""
    return f"var({_VARIABLES[color]}, {color})"


def slug(text: str) -> str:
    """Reduce a name to what an id may hold."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"
