"""Look at runs: read their folders, compare them, draw and report.

Importing this package is light: matplotlib, jinja2 and rich are imported by the functions that use them, PyTorch and
Transformers when a function is asked for that looks at models.
"""

from typing import TYPE_CHECKING, Any

from attnres.analysis.reading import load_comparison, load_run
from attnres.analysis.report import write_report, write_tables
from attnres.analysis.runs import Arm, Comparison, Curve, Depth, Run, RunResult
from attnres.analysis.table import ArmRow, comparison_table, markdown_table, render_table, table_json

__all__ = [
    "Arm",
    "ArmRow",
    "Comparison",
    "Curve",
    "Depth",
    "Run",
    "RunResult",
    "comparison_table",
    "load_comparison",
    "load_run",
    "markdown_table",
    "mixing_matrix",
    "render_table",
    "semiseparable_rank",
    "table_json",
    "write_report",
    "write_tables",
]

if TYPE_CHECKING:
    from attnres.analysis.mixing import mixing_matrix
    from attnres.analysis.ranks import semiseparable_rank


def __getattr__(name: str) -> Any:
    if name == "mixing_matrix":
        from attnres.analysis.mixing import mixing_matrix

        return mixing_matrix
    if name == "semiseparable_rank":
        from attnres.analysis.ranks import semiseparable_rank

        return semiseparable_rank
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
