"""Reading the project's Markdown files in tests: code blocks, commands, links."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
"""Every Markdown file at the top and under docs/."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced code block."""

    language: str
    text: str
    line: int


def name(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def code_blocks(document: Path, *languages: str) -> list[Block]:
    """The blocks of some languages, in order."""
    text = document.read_text(encoding="utf-8")
    blocks = [Block(match[1], match[2], text.count("\n", 0, match.start()) + 1) for match in _FENCE.finditer(text)]
    return [block for block in blocks if block.language in languages]


def commands(block: Block) -> Iterator[str]:
    """The lines of a shell block, without blank lines."""
    yield from (line.strip() for line in block.text.splitlines() if line.strip())


def run_python(document: Path, block: Block) -> None:
    """Run a Python block in a namespace of its own; a traceback shows the document's line."""
    code = compile("\n" * block.line + block.text, str(document), "exec")
    exec(code, {"__name__": "__main__"})  # noqa: S102  # code of our own documents


def prose(document: Path) -> str:
    """The text without code blocks."""
    return _FENCE.sub("", document.read_text(encoding="utf-8"))


def broken_links(document: Path) -> list[str]:
    """Relative links whose file, or whose heading in it, does not exist."""
    return [target for target in _LINK.findall(prose(document)) if not _resolves(document, target)]


def _resolves(document: Path, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return True  # an address; tests have no network
    path, _, anchor = target.partition("#")
    file = (document.parent / path).resolve() if path else document
    if not file.exists():
        return False
    return not anchor or anchor in {_slug(heading) for heading in _HEADING.findall(prose(file))}


def _slug(heading: str) -> str:
    """The anchor of a heading, on GitHub as in MkDocs."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
