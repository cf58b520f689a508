"""The tables of docs/performance.md are what the result files say."""

from attnres.bench.page import tables, update
from documents import ROOT

PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"


def test_every_number_on_the_page_comes_from_the_result_files(tmp_path):
    copy = tmp_path / "page.md"
    text = PAGE.read_text(encoding="utf-8")
    copy.write_text(text, encoding="utf-8")
    update(copy, RESULTS)
    assert copy.read_text(encoding="utf-8") == text
    assert all(table in text for table in tables(RESULTS).values())
