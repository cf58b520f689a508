"""The dataset folder: a tokenizer, one shard for each split, and the record that ties them together.

    tokenizer.json        a file of the ``tokenizers`` library
    train.bin valid.bin   token ids, little-endian uint16 or uint32
    dataset.json          format, vocabulary, type, and length and checksum of every file

A dataset is opened as a whole or not at all: whoever holds a ``Dataset`` holds files that are what they were when they
were written.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from tokenizers import Tokenizer

from attnres.data.folders import write_synced
from attnres.data.shards import DTYPES, ShardRecord, TokenShard, file_sha256, open_shard
from attnres.data.tokenizer import load_tokenizer
from attnres.errors import ConfigError, DataError

FORMAT = 1
"""Version of the folder's layout; raised when an older reader would misread it."""

SPLITS = ("train", "valid")
RECORD_FILE = "dataset.json"
TOKENIZER_FILE = "tokenizer.json"
DATASET_FILES = frozenset({RECORD_FILE, TOKENIZER_FILE, *(f"{split}.bin" for split in SPLITS)})
"""Everything that a dataset folder may hold."""


@dataclass(frozen=True, kw_only=True)
class DatasetRecord:
    """Contents of ``dataset.json``."""

    tokenizer: str
    """``"bpe-4096"`` (kind and vocabulary), ``"bytes"``, or ``"given-49152"`` for one that was not made here."""
    tokenizer_sha256: str
    """Checksum of ``tokenizer.json``: shards mean nothing with another tokenizer, even one of the same size."""
    vocab_size: int
    """Token ids are below this."""
    dtype: str
    """Type of an id in the shards, ``"uint16"`` or ``"uint32"``."""
    splits: Mapping[str, ShardRecord]
    """Shard of each split."""
    source: str
    """Where the text came from, in one line."""

    def to_json(self) -> str:
        """Text of the file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2, ensure_ascii=False) + "\n"


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """An open, verified dataset folder."""

    folder: Path
    """The folder."""
    tokenizer_name: str
    """``"bpe-4096"``, ``"bytes"`` or ``"given-49152"``."""
    vocab_size: int
    """Token ids are below this."""
    source: str
    """Where the text came from, in one line."""
    splits: Mapping[str, TokenShard]
    """Shard of each split."""

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer's file."""
        return self.folder / TOKENIZER_FILE

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer."""
        return load_tokenizer(self.tokenizer_path)

    def split(self, name: str) -> TokenShard:
        """Tokens of ``"train"`` or ``"valid"``.

        Raises:
            ConfigError: There is no such split.
        """
        if name not in self.splits:
            raise ConfigError(f"split is {name!r}; this dataset has {', '.join(self.splits)}")
        return self.splits[name]

    def bytes_per_token(self, split: str) -> float:
        """Mean UTF-8 bytes of text per token of a split."""
        return self.split(split).bytes_per_token


def open_dataset(path: Path | str) -> Dataset:
    """Open a dataset folder after checking its format, its sizes and every checksum.

    Raises:
        DataError: The folder is not a dataset, of another format, incomplete or damaged.
    """
    folder = Path(path)
    record = read_record(folder)
    tokenizer_path = folder / TOKENIZER_FILE
    vocab_size = load_tokenizer(tokenizer_path).get_vocab_size()
    if vocab_size != record.vocab_size:
        raise DataError(
            f"{tokenizer_path} has {vocab_size} tokens, but the shards were written with {record.vocab_size}"
        )
    if file_sha256(tokenizer_path) != record.tokenizer_sha256:
        raise DataError(
            f"{tokenizer_path} is not the tokenizer that wrote the shards: its SHA-256 differs from the record"
        )
    return Dataset(
        folder=folder,
        tokenizer_name=record.tokenizer,
        vocab_size=record.vocab_size,
        source=record.source,
        splits={name: open_shard(folder, name, shard, record.dtype) for name, shard in record.splits.items()},
    )


def write_record(folder: Path, record: DatasetRecord) -> None:
    """Write ``dataset.json`` and flush it."""
    write_synced(folder / RECORD_FILE, record.to_json())


def read_record(folder: Path) -> DatasetRecord:
    """Read ``dataset.json`` and check that it says something this version understands.

    Raises:
        DataError: It is missing, malformed, or of another format.
    """
    path = folder / RECORD_FILE
    if not path.is_file():
        raise DataError(f"{folder} is not a dataset folder: it has no {RECORD_FILE}")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if not isinstance(entries, dict) or entries.get("format") != FORMAT:
        seen = entries.get("format") if isinstance(entries, dict) else entries
        raise DataError(f"{path} has format {seen!r}; this version reads format {FORMAT}")
    try:
        return _record(entries)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is damaged: entry {error} is missing or not allowed") from error


def _record(entries: dict[str, Any]) -> DatasetRecord:
    record = DatasetRecord(
        tokenizer=_typed(entries, "tokenizer", str),
        tokenizer_sha256=_typed(entries, "tokenizer_sha256", str),
        vocab_size=_typed(entries, "vocab_size", int),
        dtype=_typed(entries, "dtype", str),
        splits={name: _shard_record(_typed(_typed(entries, "splits", dict), name, dict)) for name in SPLITS},
        source=_typed(entries, "source", str),
    )
    if record.dtype not in DTYPES:
        raise ValueError(f"dtype={record.dtype!r}")
    return record


def _shard_record(entries: dict[str, Any]) -> ShardRecord:
    record = ShardRecord(
        file=_typed(entries, "file", str),
        tokens=_typed(entries, "tokens", int),
        bytes=_typed(entries, "bytes", int),
        sha256=_typed(entries, "sha256", str),
    )
    # A record must not be able to point outside its folder.
    if not re.fullmatch(r"\w[\w.-]*", record.file):
        raise ValueError(f"file={record.file!r}")
    if record.tokens < 1 or record.bytes < 1:
        raise ValueError(f"tokens={record.tokens}, bytes={record.bytes}")
    return record


def _typed(entries: dict[str, Any], name: str, kind: type) -> Any:
    value = entries[name]
    if type(value) is not kind:
        raise TypeError(f"{name}={value!r}")
    return value
