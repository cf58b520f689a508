"""Where text comes from: files, folders and the bundled corpus, read in bounded pieces.

Training a tokenizer and writing shards both go over the text more than once, and neither may need the whole of it in
memory. So a source of text is something that can be iterated again and again, and yields pieces of bounded size, cut
where a cut changes no token.
"""

import codecs
import lzma
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, cast

from attnres.errors import ConfigError, DataError

PIECE_CHARACTERS = 1 << 16
"""Length at which a piece is cut at the next opportunity."""

BUNDLED_SHA256 = {
    "train": "af2615aa663f8f1fbf83264ea87eae5f48c2e064dabe40d046fc9e9594b8a064",
    "valid": "0509db07233abe007abf9833d7f05871e35af9a1023a3b59241d59adab1f94d2",
}
"""Checksums of the raw bundled texts."""


class Piece(NamedTuple):
    """A run of characters of one document."""

    text: str
    ends_document: bool


class TextSource(Protocol):
    """Documents as pieces, the same ones each time it is iterated."""

    @property
    def description(self) -> str:
        """One line for the record: where the text is from."""
        ...

    def __iter__(self) -> Iterator[Piece]: ...


class TextFiles:
    """UTF-8 text files, one document each.

    Args:
        paths: Files, or folders that stand for every ``.txt`` file below them in order of name.

    Raises:
        DataError: A path does not exist or a folder holds no ``.txt`` file; on iterating, a file is empty or binary.
        ConfigError: No path, or a file is named twice.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        if not paths:
            raise ConfigError("no text files given: name at least one file or folder")
        self.files = [file for path in paths for file in _text_files(Path(path))]
        if repeated := _first_repeated(file.resolve() for file in self.files):
            raise ConfigError(f"text file {repeated} is given twice; name each file once")

    @property
    def description(self) -> str:
        """The names of the files, without their folders: a record should not hold a machine's paths."""
        names = [file.name for file in self.files]
        return ", ".join(names) if len(names) <= 4 else f"{names[0]} ... {names[-1]} ({len(names)} files)"

    def __iter__(self) -> Iterator[Piece]:
        for file in self.files:
            try:
                with file.open("rb") as stream:
                    yield from read_document(stream, str(file))
            except OSError as error:
                raise DataError(f"text file {file} cannot be read: {error.strerror or error}") from error


class BundledText:
    """One split, ``"train"`` or ``"valid"``, of the corpus inside the package: Jane Austen's novels."""

    def __init__(self, split: str) -> None:
        if split not in BUNDLED_SHA256:
            raise ConfigError(f"bundled split is {split!r}; allowed: {', '.join(BUNDLED_SHA256)}")
        self.split = split

    @property
    def description(self) -> str:
        """What the text is."""
        return f"bundled {self.split}: Jane Austen, public domain"

    def __iter__(self) -> Iterator[Piece]:
        resource = resources.files("attnres.data") / "bundled" / f"{self.split}.txt.xz"
        with resource.open("rb") as compressed, lzma.open(compressed) as stream:
            yield from read_document(cast(BinaryIO, stream), f"bundled {self.split}")


def read_document(stream: BinaryIO, name: str) -> Iterator[Piece]:
    """Read one UTF-8 document in pieces; a byte order mark at its start is dropped.

    Raises:
        DataError: There is nothing but white space, a NUL byte, or a byte that is not UTF-8.
    """
    yield from document_pieces(_decoded(stream, name), name)


def document_pieces(parts: Iterable[str], name: str) -> Iterator[Piece]:
    """Regroup the parts of one document into pieces cut between lines, where the tokenizer cuts as well.

    A piece ends behind a line end that has no other white space around it, since byte-level BPE never joins such a
    line end with a neighbour: tokens are the same as if the text were encoded at once. Text without such a place is
    cut at four times the length, which keeps the text but may split a token there.

    Raises:
        DataError: The document is empty or only white space.
    """
    rest, blank = "", True
    for part in parts:
        blank = blank and not part.strip()
        rest += part
        while cut := _cut(rest):
            yield Piece(rest[:cut], ends_document=False)
            rest = rest[cut:]
    if blank:
        raise DataError(f"text is empty: {name} holds nothing but white space")
    yield Piece(rest, ends_document=True)


def _cut(text: str) -> int:
    """Length of the next piece of ``text``, or 0 to wait for more."""
    if len(text) <= PIECE_CHARACTERS:
        return 0
    end = text.rfind("\n", 1, len(text) - 1)
    while end > 0:
        if not text[end - 1].isspace() and not text[end + 1].isspace():
            return end + 1
        end = text.rfind("\n", 1, end)
    return PIECE_CHARACTERS if len(text) > 4 * PIECE_CHARACTERS else 0


def _decoded(file: BinaryIO, name: str) -> Iterator[str]:
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    while chunk := file.read(PIECE_CHARACTERS):
        if (nul := chunk.find(0)) >= 0:
            raise DataError(f"{name} is not text: NUL byte at byte {offset + nul}; allowed is UTF-8 without NUL")
        yield _decode(decoder, chunk, offset, name)
        offset += len(chunk)
    yield _decode(decoder, b"", offset, name)


def _decode(decoder: codecs.IncrementalDecoder, chunk: bytes, offset: int, name: str) -> str:
    pending = len(decoder.getstate()[0])
    try:
        text = decoder.decode(chunk, final=not chunk)
    except UnicodeDecodeError as error:
        at = offset - pending + error.start
        byte = error.object[error.start]
        raise DataError(f"{name} is not text: byte 0x{byte:02x} at byte {at} is not UTF-8") from error
    return text.removeprefix("\ufeff") if offset == 0 else text


def _text_files(path: Path) -> list[Path]:
    if path.is_dir():
        if files := sorted(file for file in path.rglob("*.txt") if file.is_file()):
            return files
        raise DataError(f"folder {path} holds no .txt file")
    if not path.is_file():
        raise DataError(f"text {path} does not exist; give a text file or a folder of .txt files")
    return [path]


def _first_repeated(files: Iterable[Path]) -> Path | None:
    seen: set[Path] = set()
    for file in files:
        if file in seen:
            return file
        seen.add(file)
    return None
