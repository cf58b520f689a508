"""Documents keep their word: examples run, links lead somewhere, and every page is in the navigation."""

import doctest
import importlib
from pathlib import Path

import pytest

from documents import DOCUMENTS, ROOT, Block, broken_links, code_blocks, name, run_python

PAGES = [document for document in DOCUMENTS if document.is_relative_to(ROOT / "docs")]
SOURCE = ROOT / "src"
WITH_EXAMPLES = [
    ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted(SOURCE.rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]

EXAMPLES = [
    pytest.param(page, block, id=f"{name(page)}:{block.line}")
    for page in PAGES
    if page.parent.name != "guides"  # run with the guide's commands, in test_readme.py
    for block in code_blocks(page, "python")
]


@pytest.mark.parametrize(("page", "block"), EXAMPLES)
def test_python_blocks_run(page: Path, block: Block, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(page, block)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_resolve(document: Path) -> None:
    assert broken_links(document) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_page_is_in_the_navigation(page: Path) -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert f": {page.relative_to(ROOT / 'docs').as_posix()}\n" in navigation


def test_modules_with_examples_are_found() -> None:
    assert {"attnres.ops.depth_attention", "attnres.residual.schedule", "attnres.models.convert"} < set(WITH_EXAMPLES)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_doctests_pass(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
