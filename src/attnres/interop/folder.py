"""A checkpoint folder of safetensors and JSON: read without running anything in it, written whole or not at all.

A folder has a ``config.json`` and its weights in one file, or in several with an index. Whatever else it holds that a
tokenizer or a generation needs is copied; code is not.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from attnres.data.folders import publish_folder, write_synced
from attnres.errors import CheckpointError
from attnres.interop.stored import StoredTensor, read_header, write_file

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LARGEST_JSON = 1 << 28
"""Bytes of a config or an index; the index of a million tensors is about half of it."""

_COPIED = re.compile(
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|generation_config|chat_template)\.json"
    r"|merges\.txt|vocab\.txt|tokenizer\.model|tiktoken\.model|spiece\.model|sentencepiece\.bpe\.model|tekken\.json"
    r"|[\w.-]+\.tiktoken|chat_template\.jinja|LICENSE(\.\w+)?"
)
"""Files beside the weights that are copied as they are."""
_TEMPLATES = "additional_chat_templates"
"""Folder of chat templates beside the first."""
_SHARD = re.compile(r"[\w-][\w.-]*\.safetensors")
_EXECUTABLE = ("*.bin", "*.pt", "*.pth", "*.ckpt")
"""Weights in formats that run code when they are loaded."""


@final
@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """What is in a checkpoint folder; the tensors themselves stay on disk."""

    path: Path
    """The folder."""
    config: Mapping[str, Any]
    """Its ``config.json``."""
    tensors: Mapping[str, StoredTensor]
    """Every tensor by name."""
    metadata: Mapping[str, Mapping[str, str]]
    """The metadata of each file of weights, by file name."""
    index: Mapping[str, Any] | None
    """The metadata of the index; None where there is just one file."""


def open_folder(path: Path) -> CheckpointFolder:
    """Read the config and the headers of a checkpoint folder, and check that they fit.

    Raises:
        CheckpointError: It is no folder, a file is missing, damaged, cut short or of a format that runs code, or the
            index contradicts the files.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; allowed is one with {CONFIG} and safetensors")
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path} has no {CONFIG}")
    config = read_json(path / CONFIG)
    names, index = _weight_files(path)
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, Mapping[str, str]] = {}
    for name in names:
        if not (path / name).is_file():
            raise CheckpointError(f"{path} has no {name}, which {INDEX} names")
        found, metadata[name] = read_header(path / name)
        for tensor in found:
            if tensor.name in tensors:
                raise CheckpointError(f"{path}: {tensor.name} is in {tensors[tensor.name].file.name} and in {name}")
            tensors[tensor.name] = tensor
    if index is not None:
        _check_index(path, index["weight_map"], tensors)
    return CheckpointFolder(
        path=path,
        config=config,
        tensors=tensors,
        metadata=metadata,
        index=None if index is None else _table(index.get("metadata", {}), path / INDEX),
    )


def check_absent(destination: Path) -> None:
    """Refuse a destination that is there already.

    Raises:
        CheckpointError: It is.
    """
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination} exists already; allowed is a new folder")


def write_folder(
    destination: Path,
    source: CheckpointFolder,
    *,
    config: Mapping[str, Any],
    tensors: Sequence[StoredTensor],
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write a folder with the tensors given, each in a file of the name of that it comes from.

    ``texts`` are further files, by name.

    Raises:
        CheckpointError: The destination is there by now. It stays as it was.
    """
    check_absent(destination)
    by_file: dict[str, list[StoredTensor]] = {}
    for tensor in sorted(tensors, key=lambda tensor: (tensor.file.name, tensor.spans)):
        by_file.setdefault(tensor.file.name, []).append(tensor)
    try:
        with publish_folder(destination, replace=False) as folder:
            write_synced(folder / CONFIG, to_json(config))
            for name, group in by_file.items():
                write_file(folder / name, group, source.metadata[name] or {"format": "pt"})
            if source.index is not None:
                write_synced(folder / INDEX, to_json(_new_index(source.index, by_file)))
            _copy_others(source.path, folder)
            for name, text in (texts or {}).items():
                write_synced(folder / name, text)
    except FileExistsError as error:
        raise CheckpointError(f"{destination} exists already; allowed is a new folder") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: It is too large, not JSON, or not an object.
    """
    size = path.stat().st_size
    if size > LARGEST_JSON:
        raise CheckpointError(f"{path} has {size} bytes; allowed are {LARGEST_JSON}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        to_json(value).encode()  # a lone surrogate can be read, but not written
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: not JSON ({error})") from error
    return _table(value, path)


def to_json(value: Any) -> str:
    """Readable JSON with a final newline."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _table(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: a {type(value).__name__} where a table belongs")
    return value


def _weight_files(path: Path) -> tuple[list[str], dict[str, Any] | None]:
    """The files of weights, and the index if there is one."""
    single, index = (path / WEIGHTS).is_file(), (path / INDEX).is_file()
    if single and index:
        raise CheckpointError(f"{path} has {WEIGHTS} and {INDEX}; allowed is one of the two")
    if single:
        return [WEIGHTS], None
    if not index:
        others = sorted(file.name for pattern in _EXECUTABLE for file in path.glob(pattern))
        seen = f", only {', '.join(others)}, which is not read because loading it can run code" if others else ""
        raise CheckpointError(f"{path} has no {WEIGHTS} and no {INDEX}{seen}")
    content = read_json(path / INDEX)
    files = _table(content.get("weight_map"), path / INDEX).values()
    for file in files:
        if not isinstance(file, str) or not _SHARD.fullmatch(file):
            raise CheckpointError(f"{path / INDEX} names the file {file!r}; allowed are safetensors files beside it")
    if not files:
        raise CheckpointError(f"{path / INDEX} names no tensor")
    return sorted(set(files)), content


def _check_index(path: Path, weight_map: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> None:
    problems = {
        "named but absent": [name for name in weight_map if name not in tensors],
        "not named": [name for name in tensors if name not in weight_map],
        "in another file": [n for n, file in weight_map.items() if n in tensors and tensors[n].file.name != file],
    }
    raise_problems(f"{path / INDEX} contradicts the files", problems)


def raise_problems(title: str, problems: Mapping[str, Sequence[str]], *, most: int = 40) -> None:
    """Raise one error with the lists of what is wrong, unless all are empty.

    Raises:
        CheckpointError: A list is not empty. Of a long one the first entries and the number of the others are told.
    """
    told = []
    for what, names in problems.items():
        if names:
            rest = f" and {len(names) - most} more" if len(names) > most else ""
            told.append(f"{what}: {', '.join(names[:most])}{rest}")
    if told:
        raise CheckpointError(f"{title}: {'; '.join(told)}")


def _new_index(metadata: Mapping[str, Any], by_file: Mapping[str, Sequence[StoredTensor]]) -> dict[str, Any]:
    total = sum(tensor.num_bytes for group in by_file.values() for tensor in group)
    weight_map = {tensor.name: name for name, group in by_file.items() for tensor in group}
    return {"metadata": {**metadata, "total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _copy_others(source: Path, folder: Path) -> None:
    files = [file for file in sorted(source.iterdir()) if _COPIED.fullmatch(file.name)]
    for file in [*files, *sorted((source / _TEMPLATES).glob("*.jinja"))]:
        if not file.is_file():
            continue
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
        with copy.open("rb") as copied:
            os.fsync(copied.fileno())
