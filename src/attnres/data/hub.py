"""Text from Hugging Face ``datasets``: the one file that imports that library.

It is an extra, and its hub needs a network; local files and folders work without one. Every row is one document.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from attnres.data.text import PIECE_CHARACTERS, Piece, document_pieces
from attnres.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@final
@dataclass(frozen=True, kw_only=True)
class HubText:
    """Rows of a dataset, read from one text column. Rows that are blank are skipped."""

    path: str
    """Name on the hub, a folder made by ``save_to_disk``, or a local .json, .jsonl or .parquet file."""
    name: str | None = None
    """Configuration of a dataset that has several."""
    split: str = "train"
    """Split; not used for a local file or for a folder that holds a single split."""
    column: str = "text"
    """Column that holds the text."""

    @property
    def description(self) -> str:
        """Name, configuration, split and column."""
        path = Path(self.path).name if Path(self.path).exists() else self.path
        return f"datasets {path}{f' ({self.name})' if self.name else ''}, split {self.split}, column {self.column}"

    def __iter__(self) -> Iterator[Piece]:
        found = False
        for index, row in enumerate(self._checked_rows()):
            text = self._text(row, index)
            if text.strip():
                found = True
                yield from document_pieces(_parts(text), f"row {index} of {self.path}")
        if not found:
            raise DataError(f"text is empty: column {self.column!r} of {self.path} holds nothing but white space")

    def _text(self, row: "Mapping[str, Any]", index: int) -> str:
        if self.column not in row:
            raise DataError(f"{self.path} has no column {self.column!r}; it has {', '.join(sorted(row))}")
        text = row[self.column]
        if not isinstance(text, str):
            raise DataError(f"row {index} of {self.path}: column {self.column!r} holds {type(text).__name__}, not text")
        if "\0" in text:
            raise DataError(f"row {index} of {self.path} is not text: NUL at character {text.index(chr(0))}")
        return text

    def _checked_rows(self) -> "Iterator[Mapping[str, Any]]":
        errors = _load_errors()
        try:
            yield from self._rows
        except errors as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise DataError(f"dataset {self.path} (split {self.split}) cannot be read: {reason[0]}") from error

    @cached_property
    def _rows(self) -> "Iterable[Mapping[str, Any]]":
        datasets = _import_datasets()
        local = Path(self.path)
        if local.is_file():
            return self._file_rows(local)
        if any((local / file).is_file() for file in ("dataset_dict.json", "state.json")):
            return self._saved_rows(local)
        if local.suffix in _BUILDERS or local.is_absolute() or self.path.startswith("."):
            raise DataError(f"{self.path} does not exist; allowed: a local file or saved dataset, or a name on the hub")
        return datasets.load_dataset(self.path, self.name, split=self.split)

    def _file_rows(self, file: Path) -> "Iterable[Mapping[str, Any]]":
        if file.suffix not in _BUILDERS:
            raise DataError(f"dataset file {file} has suffix {file.suffix!r}; allowed: {', '.join(_BUILDERS)}")
        # Streaming reads the file as it is; without it the library would first copy it into a cache of its own.
        return _import_datasets().load_dataset(
            _BUILDERS[file.suffix], data_files=str(file), split="train", streaming=True
        )

    def _saved_rows(self, folder: Path) -> "Iterable[Mapping[str, Any]]":
        saved = _import_datasets().load_from_disk(str(folder))
        if not isinstance(saved, dict):
            return saved
        if self.split not in saved:
            raise DataError(f"dataset {folder} has no split {self.split!r}; it has {', '.join(map(str, saved))}")
        return saved[self.split]


def _parts(text: str) -> Iterator[str]:
    return (text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS))


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError("Hugging Face datasets is not installed; pip install 'attnres[datasets]'") from error
    return datasets


def _load_errors() -> tuple[type[Exception], ...]:
    """What the library raises for a name, split or file it cannot read, with or without a network."""
    return (OSError, ValueError, _import_datasets().exceptions.DatasetsError)
