"""Look at runs: read their folders, compare them, draw and report.

Importing this package is light: matplotlib, jinja2 and rich are imported by the functions that use them.
"""

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
    "render_table",
    "table_json",
    "write_report",
    "write_tables",
]
