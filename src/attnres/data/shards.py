"""Token shards: one flat file of token ids for each split, written in pieces and read by memory map.

A shard has no header. What it must look like (type, length, checksum) stands in the record beside it, so that a file
that was cut, swapped or damaged is found when it is opened and not hours later as a strange loss.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from tokenizers import Tokenizer

from attnres.data.sampler import check_context
from attnres.data.text import Piece
from attnres.data.tokenizer import end_of_text_id
from attnres.errors import DataError

DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
"""Name in the record -> little-endian type in the file."""

_BATCH_CHARACTERS = 1 << 19
_BATCH_PIECES = 1024


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """What ``dataset.json`` says about one shard."""

    file: str
    """Name of the file in the dataset folder."""
    tokens: int
    """Token ids in the file."""
    bytes: int
    """UTF-8 bytes of the text they stand for, without end-of-text tokens."""
    sha256: str
    """Checksum of the file."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class TokenShard:
    """The tokens of one split, mapped from disk and read-only."""

    name: str
    """Split, ``"train"`` or ``"valid"``."""
    tokens: np.memmap
    """Token ids, uint16 or uint32."""
    num_bytes: int
    """UTF-8 bytes of the text, without end-of-text tokens."""
    sha256: str
    """Checksum of the tokens, fit to tell whether two runs saw the same data."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def bytes_per_token(self) -> float:
        """Mean UTF-8 bytes of text that one token stands for; bits per byte = nats per token / (ln 2 * this)."""
        return self.num_bytes / len(self)

    def windows(self, starts: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
        """Read the windows that begin at ``starts``.

        Args:
            starts: Positions ``[B]``, such as a sampler's batch.
            context: Tokens T of a window.

        Returns:
            Inputs ``tokens[s : s + T]`` and targets ``tokens[s + 1 : s + T + 1]``, int64 ``[B, T]`` each.

        Raises:
            DataError: The context is longer than the shard, or a window reaches outside it.
        """
        check_context(len(self), context)
        last = len(self) - context - 1
        if len(starts) and not 0 <= starts.min() <= starts.max() <= last:
            raise DataError(
                f"window starts {starts.min()} to {starts.max()} leave the {self.name} shard; allowed: 0 to {last}"
            )
        tokens = self.tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)
        return tokens[:, :-1], tokens[:, 1:]


def dtype_for(vocab_size: int) -> str:
    """Name of the smallest type that holds every id of the vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def write_shard(path: Path, pieces: Iterable[Piece], tokenizer: Tokenizer, dtype: str) -> ShardRecord:
    """Encode pieces of text into a new file, an end-of-text token behind each document, and flush it to disk.

    Memory does not grow with the text: about half a million characters are encoded at a time.

    Raises:
        DataError: There is no token to write.
    """
    digest, tokens, num_bytes = hashlib.sha256(), 0, 0
    with path.open("xb") as file:
        for batch in _batches(pieces):
            ids = _encode(batch, tokenizer, DTYPES[dtype])
            file.write(ids.data)
            digest.update(ids.data)
            tokens += len(ids)
            num_bytes += sum(len(piece.text.encode()) for piece in batch)
        file.flush()
        os.fsync(file.fileno())
    if not tokens:
        raise DataError(f"no text for {path.name}: a split needs at least one token")
    return ShardRecord(file=path.name, tokens=tokens, bytes=num_bytes, sha256=digest.hexdigest())


def open_shard(folder: Path, name: str, record: ShardRecord, dtype: str) -> TokenShard:
    """Verify size and checksum of a shard and map it.

    Raises:
        DataError: The file is missing, has another size than recorded, or its checksum differs.
    """
    path = folder / record.file
    if not path.is_file():
        raise DataError(f"shard {path} is missing")
    size, expected = path.stat().st_size, record.tokens * DTYPES[dtype].itemsize
    if size != expected:
        raise DataError(f"shard {path} has {size} bytes, but {record.tokens} tokens of {dtype} are {expected} bytes")
    if (seen := file_sha256(path)) != record.sha256:
        raise DataError(f"shard {path} is corrupted: its SHA-256 is {seen}, recorded is {record.sha256}")
    tokens = np.memmap(path, dtype=DTYPES[dtype], mode="r")
    return TokenShard(name=name, tokens=tokens, num_bytes=record.bytes, sha256=record.sha256)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(batch: Sequence[Piece], tokenizer: Tokenizer, dtype: np.dtype) -> np.ndarray:
    encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
    end = np.array([end_of_text_id(tokenizer)], dtype)
    parts: list[np.ndarray] = []
    for piece, encoding in zip(batch, encodings, strict=True):
        parts.append(np.array(encoding.ids, dtype))
        if piece.ends_document:
            parts.append(end)
    return np.concatenate(parts)
