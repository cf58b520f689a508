"""The tables of docs/strategies.md are what the command prints."""

from attnres.experiments.catalog import catalog, catalog_markdown
from documents import ROOT


def test_the_tables_are_those_of_the_strategies_as_they_are():
    page = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    shown = page.partition("--markdown -->\n")[2].partition("<!-- end of tables -->")[0]
    assert shown.strip() == catalog_markdown(catalog(num_sublayers=32, dim=1024)).strip()
