"""Tensors of a checkpoint, written by every rank at once and read by any number of ranks.

Written by PyTorch's distributed checkpoint in its safetensors form, one file a rank with the offset of each piece in
the header: no pickle anywhere, so a checkpoint cannot run code. Read here, piece by piece: a rank takes from whatever
files there are what its own shards overlap, so neither the number of ranks nor the cut of the layers has to be the one
that wrote them, and a plain safetensors file is merely the case of one piece.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from attnres.errors import CheckpointError

_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Where PyTorch's writer says in a file's header where in its tensor a piece lies."""


def write_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the tensors of all ranks of the default group into one folder, and flush them to disk.

    Args:
        tensors: By name: those of this rank, sharded or whole. What several ranks hold is written by one of them.
        folder: An empty folder that every rank can write to.

    Raises:
        CheckpointError: A rank could not write; it is raised on every rank.
    """
    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        told = "; ".join(f"rank {rank}: {wrapped[0]!r}" for rank, wrapped in sorted(error.failures.items()))
        raise CheckpointError(f"the checkpoint could not be written to {folder}: {told}") from error


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a tensor, as it lies in a file."""

    file: Path
    offsets: tuple[int, ...]
    """Where in the tensor it begins, in each dimension."""
    shape: tuple[int, ...]
    """Its size."""


@final
class StoredTensors(Mapping[str, Tensor]):
    """The tensors that some safetensors files hold together, in pieces or whole; a value is read when it is asked for.

    Args:
        files: All files of one set; headers are read at once.

    Raises:
        CheckpointError: A file cannot be read.
    """

    def __init__(self, files: Iterable[Path]):
        self._pieces: dict[str, list[Piece]] = {}
        for file in files:
            try:
                self._note(file)
            except (OSError, SafetensorError, ValueError, KeyError) as error:
                raise CheckpointError(f"{file} is no readable safetensors file: {error}") from error

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.read(name, (0,) * len(shape), shape)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._pieces))

    def __len__(self) -> int:
        return len(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Size of a whole tensor."""
        pieces = self._pieces[name]
        ends = [[a + b for a, b in zip(piece.offsets, piece.shape, strict=True)] for piece in pieces]
        return tuple(max(sizes) for sizes in zip(*ends, strict=True))

    def read(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A part of a tensor.

        Args:
            name: Of the tensor.
            offsets: Where it begins.
            shape: Its size.

        Raises:
            CheckpointError: The pieces do not cover it, or a file cannot be read.
        """
        result: Tensor | None = None
        filled = 0
        for piece in self._pieces[name]:
            inside = _overlap(piece, offsets, shape)
            if inside is None:
                continue
            there, here = inside
            part = _read(piece.file, name, there)
            if tuple(part.shape) == tuple(shape):
                return part
            if result is None:
                result = torch.empty(shape, dtype=part.dtype)
            result[here] = part
            filled += part.numel()
        whole = torch.Size(shape).numel()
        if result is None and whole == 0:
            return torch.empty(shape, dtype=_read(self._pieces[name][0].file, name, None).dtype)
        if result is None or filled < whole:
            raise CheckpointError(f"the files hold {filled} of the {whole} numbers of {name} that are asked for")
        return result

    def copy_into(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite tensors with what is stored under their names; of a sharded one, this rank's shard."""
        with torch.no_grad():
            for name, target in targets:
                local, offsets = local_shard(target)
                local.copy_(self.read(name, offsets, tuple(local.shape)))

    def _note(self, file: Path) -> None:
        with safe_open(file, framework="pt") as opened:
            header: dict[str, Any] = opened.metadata() or {}
            sharding = json.loads(header.get(_SHARDING, "null"))
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                shape = tuple(opened.get_slice(name).get_shape())
                offsets = (0,) * len(shape) if sharding is None else tuple(sharding[name][_OFFSETS])
                self._pieces.setdefault(name, []).append(Piece(file=file, offsets=offsets, shape=shape))


def _overlap(
    piece: Piece, offsets: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where a piece and a wanted part meet: as slices of the piece, and as slices of the part."""
    there, here = [], []
    for begin, size, wanted, length in zip(piece.offsets, piece.shape, offsets, shape, strict=True):
        first, stop = max(begin, wanted), min(begin + size, wanted + length)
        if first >= stop:
            return None
        there.append(slice(first - begin, stop - begin))
        here.append(slice(first - wanted, stop - wanted))
    return tuple(there), tuple(here)


def _read(file: Path, name: str, where: tuple[slice, ...] | None) -> Tensor:
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.get_slice(name)[where] if where else opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


def local_shard(target: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a tensor, and where in the whole it begins."""
    if not isinstance(target, DTensor):
        return target, (0,) * target.ndim
    _, offsets = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    return target.to_local(), tuple(offsets)
