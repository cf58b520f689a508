"""One self-contained HTML file of a comparison or a run, rebuilt from its folder alone.

No script, no network, nothing beside the file: it can be mailed, archived and printed. It holds no date of its own and
no path, so that the same folder gives the same bytes wherever and whenever it is rebuilt.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from attnres.analysis import captions, depth_figures, facts, figures
from attnres.analysis.depth_figures import mean_matrix
from attnres.analysis.numbers import DASH, decimal, duration, memory, whole
from attnres.analysis.reading import load_comparison
from attnres.analysis.runs import Arm, Comparison, Run
from attnres.analysis.svg import ARM_COLORS, BASELINE_COLOR, arm_styles, css_color, slug
from attnres.analysis.table import (
    columns_for,
    comparison_table,
    folded_cells,
    markdown_table,
    table_json,
    table_notes,
)
from attnres.errors import ConfigError

REPORT_NAME = "report.html"
"""Name of the report inside its folder."""

NUMBERS_UP_TO = 48
"""Sublayers up to which the report lists every depth weight as a number."""

DARK_COLORS = ("#9aa4b2", "#4da3e0", "#ff8a4c", "#2fc39a", "#e39cc6", "#dcae3f", "#7cc4f0")
"""Colours of the baseline and the other arms on a dark page."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure with its heading and caption."""

    title: str
    """Heading."""
    svg: str
    """The figure."""
    caption: str
    """What it shows."""


def write_report(folder: Path | str, out: Path | str | None = None) -> Path:
    """Write the report of a compare folder or of a lone run folder.

    Args:
        folder: What ``attnres compare`` or ``attnres train`` wrote.
        out: The file to write, or a folder to write ``report.html`` into; ``None`` means the folder itself.

    Returns:
        The file. It is replaced as a whole or not at all.

    Raises:
        CheckpointError: There is no such folder.
        ConfigError: ``compare.json`` or ``config.json`` is missing or damaged, or ``out`` cannot be written to.
        DataError: Another file of a run is damaged.
    """
    target = Path(folder) if out is None else Path(out)
    comparison = load_comparison(folder)
    if target.is_dir():
        target = target / REPORT_NAME
    if not target.parent.is_dir():
        raise ConfigError(f"{target}: there is no folder {target.parent} to write the report into")
    _replace(target, render_report(comparison).encode())
    return target


def write_tables(folder: Path | str) -> list[Path]:
    """Write the comparison table beside the runs, as ``table.json`` for programs and ``table.md`` for readers.

    Args:
        folder: What ``attnres compare`` or ``attnres train`` wrote.

    Returns:
        The two files. Each is replaced as a whole or not at all.

    Raises:
        CheckpointError: There is no such folder.
        ConfigError: ``compare.json`` or ``config.json`` is missing or damaged.
        DataError: Another file of a run is damaged.
    """
    rows = comparison_table(load_comparison(folder))
    contents = {"table.json": table_json(rows), "table.md": markdown_table(rows)}
    for name, text in contents.items():
        _replace(Path(folder) / name, f"{text.strip()}\n".encode())
    return [Path(folder) / name for name in contents]


def render_report(comparison: Comparison) -> str:
    """Make the page, the same text for the same data every time."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    source = files("attnres.analysis").joinpath("templates/report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(_context(comparison))


def _context(comparison: Comparison) -> dict[str, Any]:
    rows, settings = comparison_table(comparison), facts.settings(comparison)
    styles, columns = arm_styles(comparison), columns_for(rows)
    measured = [arm for arm in comparison.arms if arm.depths]
    return {
        "name": comparison.name,
        "lone": comparison.baseline is None,
        "size": facts.size_line(comparison, rows),
        "findings": facts.findings(comparison, rows),
        "columns": columns,
        "rows": [(row, css_color(styles[row.arm].color), folded_cells(row, columns)) for row in rows],
        "notes": table_notes(rows),
        "training": _training_pictures(comparison),
        "magnitudes": _magnitude_pictures(comparison) if measured else [],
        "mixing_text": captions.mixing_matrices(comparison),
        "mixing": [_mixing_picture(comparison, index, arm) for index, arm in enumerate(measured)],
        "summaries": [facts.depth_summary(arm) for arm in measured],
        "weights": [(arm.label, _weights(arm)) for arm in measured if arm.depths[0].num_sublayers <= NUMBERS_UP_TO],
        "unmeasured": [arm.label for arm in comparison.arms if not arm.depths],
        "runs": [_run_cells(arm, seed, run) for arm in comparison.arms for seed, run in arm.runs.items()],
        "arm_labels": [arm.label for arm in comparison.arms if arm.runs],
        "differing": [setting for setting in settings if not setting.shared],
        "shared": [setting for setting in settings if setting.shared],
        "environment": facts.environments(comparison),
        "caveats": facts.caveats(comparison, rows),
        "light_colors": (BASELINE_COLOR, *ARM_COLORS),
        "dark_colors": DARK_COLORS,
    }


def _training_pictures(comparison: Comparison) -> list[Picture]:
    return [
        _picture("Loss during training", figures.loss_curves, captions.loss_curves, comparison),
        _picture("Loss against time", figures.loss_over_time, captions.loss_over_time, comparison),
    ]


def _magnitude_pictures(comparison: Comparison) -> list[Picture]:
    return [
        _picture("Output magnitude", depth_figures.output_magnitude, captions.output_magnitude, comparison),
        _picture("Gradient magnitude", depth_figures.gradient_magnitude, captions.gradient_magnitude, comparison),
        _picture("Input magnitude", depth_figures.input_magnitude, captions.input_magnitude, comparison),
    ]


def _picture(
    title: str, draw: Callable[[Comparison], str], caption: Callable[[Comparison], str], comparison: Comparison
) -> Picture:
    return Picture(title=title, svg=draw(comparison), caption=caption(comparison))


def _mixing_picture(comparison: Comparison, index: int, arm: Arm) -> Picture:
    svg = depth_figures.mixing_matrix(comparison, arm, key=f"mixing-{index}-{slug(arm.name)}")
    return Picture(title=arm.label, svg=svg, caption=captions.mixing_matrix(arm))


def _weights(arm: Arm) -> list[tuple[str, list[str]]]:
    """Write the depth weights of an arm: (site, weight of each source it can read)."""
    matrix = mean_matrix(arm.depths)
    names = [*(str(site) for site in range(1, len(matrix))), "output"]
    return [(name, [decimal(float(w), 2) for w in matrix[row, : row + 1]]) for row, name in enumerate(names)]


def _run_cells(arm: Arm, seed: int, run: Run) -> list[str]:
    result = run.result
    if result is None:
        return [arm.label, str(seed), run.status, whole(run.last_step), *[DASH] * 6]
    return [
        arm.label,
        str(seed),
        run.status,
        whole(result.steps),
        whole(result.tokens),
        decimal(result.valid_loss),
        decimal(result.bits_per_byte),
        whole(result.tokens_per_second),
        duration(result.seconds),
        memory(result.peak_memory_bytes),
    ]


def _replace(target: Path, content: bytes) -> None:
    """Write aside, force to disk, rename: whoever opens the file sees the old page or the new one."""
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(target)
    except OSError as problem:
        raise ConfigError(f"{target}: the report cannot be written ({problem.strerror})") from problem
    finally:
        aside.unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
