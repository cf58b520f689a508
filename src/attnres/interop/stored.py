"""Safetensors files as they lie on disk: what is in them, and new files made of parts of them.

To rename a checkpoint's tensors nothing has to be loaded: a name is in the header, and the bytes are copied as they
are, a few megabytes at a time. So a dtype that nobody here can compute with passes through, and a shard may be larger
than the memory. Every size is checked against the size of the file before anything is read.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, final

from attnres.errors import CheckpointError

Shape = tuple[int, ...]

LONGEST_HEADER = 100_000_000
"""Bytes of a header; the format allows no more."""
CHUNK = 1 << 23
"""Bytes that are held at a time when tensors are copied or compared."""

BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of a value by the format's name of its dtype."""


@final
@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file: what the header says of it, and where its bytes are."""

    name: str
    """Its name; need not be the one it has in the file."""
    dtype: str
    """The format's name of its dtype, such as ``"BF16"``."""
    shape: Shape
    """Its shape."""
    file: Path
    """The file that holds the bytes."""
    spans: tuple[tuple[int, int], ...]
    """Where they are, in order: offset from the start of the file and number of bytes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all its values."""
        return sum(length for _, length in self.spans)

    def renamed(self, name: str, shape: Shape) -> Self:
        """The same bytes under another name, with axes of length 1 put in or taken out."""
        assert math.prod(shape) == math.prod(self.shape)
        return replace(self, name=name, shape=shape)

    def repeated(self, times: int) -> Self:
        """Several copies, along a new first axis."""
        return replace(self, shape=(times, *self.shape), spans=self.spans * times)

    def row(self, index: int) -> Self:
        """One entry along the first axis of a tensor that lies in the file in one piece."""
        ((offset, length),) = self.spans
        step = length // self.shape[0]
        return replace(self, shape=self.shape[1:], spans=((offset + index * step, step),))

    def chunks(self) -> Iterator[bytes]:
        """Its bytes, a part at a time.

        Raises:
            CheckpointError: The file has become shorter since its header was read.
        """
        with self.file.open("rb") as file:
            for offset, length in self.spans:
                file.seek(offset)
                for start in range(0, length, CHUNK):
                    chunk = file.read(min(CHUNK, length - start))
                    if len(chunk) < min(CHUNK, length - start):
                        raise CheckpointError(f"{self.file} ended while {self.name} was read; it has been changed")
                    yield chunk


def same_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return all(ours == theirs for ours, theirs in zip(first.chunks(), second.chunks(), strict=True))


def read_header(path: Path) -> tuple[list[StoredTensor], dict[str, str]]:
    """The tensors of a safetensors file in the order of their bytes, and the file's metadata.

    Raises:
        CheckpointError: The file is not of this format, is cut short, or its header contradicts itself.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise CheckpointError(
                f"{path} is cut short or not a safetensors file: a header of {length} bytes in a file of {size}"
            )
        header = _parse(path, file.read(length))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path} is damaged: its __metadata__ is not a table of strings")
    tensors = [_tensor(path, name, entry, start=8 + length) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: tensor.spans)
    _check_layout(path, tensors, start=8 + length, size=size)
    return tensors, metadata


def write_file(path: Path, tensors: Iterable[StoredTensor], metadata: Mapping[str, str]) -> None:
    """Write a new safetensors file, tensors in the order given, and flush it to disk."""
    tensors = list(tensors)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for tensor in tensors:
        stop = offset + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the values are aligned
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            file.writelines(tensor.chunks())
        file.flush()
        os.fsync(file.fileno())


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
        return dict(pairs)

    try:
        header = json.loads(text, object_pairs_hook=unique)
        json.dumps(header, ensure_ascii=False).encode()  # a lone surrogate can be read, but not written
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged or not a safetensors file: its header is not JSON ({error})"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is damaged or not a safetensors file: its header is not a table")
    return header


def _tensor(path: Path, name: str, entry: Any, *, start: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(first), int(stop)]}:
            if dtype not in BITS:
                raise CheckpointError(f"{path}: dtype of {name} is {dtype}; allowed: {', '.join(BITS)}")
            if all(type(length) is int and length >= 0 for length in shape) and 0 <= first <= stop:
                needed = math.prod(shape) * BITS[dtype]
                if needed == 8 * (stop - first):
                    spans = ((start + first, stop - first),)
                    return StoredTensor(name=name, dtype=dtype, shape=tuple(shape), file=path, spans=spans)
    raise CheckpointError(f"{path} is damaged: its header says of {name} {json.dumps(entry)[:200]}")


def _check_layout(path: Path, tensors: list[StoredTensor], *, start: int, size: int) -> None:
    """The bytes of the tensors follow one another from the header to the end of the file."""
    at = start
    for tensor in tensors:
        ((offset, length),) = tensor.spans
        if offset != at:
            raise CheckpointError(f"{path} is damaged: the bytes of {tensor.name} begin at {offset} instead of {at}")
        at += length
    if at != size:
        how = "cut short" if at > size else "damaged"
        raise CheckpointError(f"{path} is {how}: its header describes {at} bytes, and the file has {size}")
