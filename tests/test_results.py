"""Committed results: the tables beside them are what their run folders give today."""

import json

import pytest

from attnres.analysis import comparison_table, load_comparison, markdown_table, table_json
from documents import ROOT

STUDIES = sorted(path.parent for path in (ROOT / "results").glob("*/compare.json"))
LOG = (ROOT / "results" / "LOG.md").read_text(encoding="utf-8")


def test_there_are_results():
    assert STUDIES


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_tables_are_rebuilt_from_the_runs(study):
    rows = comparison_table(load_comparison(study))
    assert json.loads(table_json(rows)) == json.loads((study / "table.json").read_text(encoding="utf-8"))
    assert markdown_table(rows).strip() == (study / "table.md").read_text(encoding="utf-8").strip()


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_every_run_is_whole_and_read_in_the_log(study):
    assert f"results/{study.name}" in LOG
    for runs in json.loads((study / "compare.json").read_text(encoding="utf-8"))["runs"].values():
        for run in runs:
            for file in ("config.json", "environment.json", "metrics.jsonl", "result.json", "depth.json"):
                assert (study / run / file).is_file(), f"{run}/{file}"
            assert json.loads((study / run / "environment.json").read_text())["commit"]["dirty"] is False
