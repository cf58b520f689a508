"""Checkpoints on disk: whole or absent, verified before use, and free of anything that runs code.

    checkpoints/step-00000500/
        model.safetensors      weights, tied ones once
        optimizer.safetensors  moments and step counts, keyed by parameter name
        state.json             step, data position, random generators, callbacks
        manifest.json          size and SHA-256 of each of the above

A run on several processes has folders ``model/`` and ``optimizer/`` in place of the two files, with one file a rank
(`attnres.parallel.checkpoint`); everything reads the one as well as the other.

A checkpoint is written aside in the same folder, flushed, and renamed into place. A process killed at any moment leaves
at most a hidden ``.*.partial`` folder, which the next start removes.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from attnres.data.folders import publish_folder
from attnres.data.shards import file_sha256
from attnres.errors import CheckpointError
from attnres.parallel.checkpoint import StoredTensors, write_tensors
from attnres.parallel.mesh import Mesh
from attnres.train.files import sync, to_json

FORMAT = 1
"""Version of the layout; raised when an older reader would misread it."""

SHARDED_FORMAT = 2
"""The layout with a file for each rank."""

CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints in a run folder."""

MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
FILES = (MODEL, OPTIMIZER, STATE)
SHARDED_MODEL, SHARDED_OPTIMIZER = "model", "optimizer"
"""Folders of a sharded checkpoint."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A verified checkpoint in memory."""

    path: Path
    """Its folder."""
    model: Mapping[str, Tensor]
    """Weights by name."""
    optimizer: Mapping[str, Tensor]
    """Optimizer state by ``name/slot``."""
    state: Mapping[str, Any]
    """Everything else, as JSON values; ``state["step"]`` is the number of optimizer steps done."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state["step"]


@final
class Checkpoints:
    """The checkpoints of one run.

    Args:
        root: Folder that holds them; made at the first save.
    """

    def __init__(self, root: Path):
        self.root = root

    def paths(self) -> list[Path]:
        """Checkpoint folders, oldest first."""
        found = [path for path in self.root.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def save(self, *, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Write a checkpoint of step ``state["step"]`` and return its folder once it is whole and on disk."""
        target = self.root / f"step-{state['step']:08d}"
        with publish_folder(target, replace=False) as folder:
            for name, tensors in ((MODEL, model), (OPTIMIZER, optimizer)):
                contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
                try:
                    save_file(contiguous, folder / name, metadata={"format": "pt"})
                except SafetensorError as error:  # a full disk, told without its number
                    raise CheckpointError(f"the checkpoint could not be written to {target}: {error}") from error
                (folder / name).chmod(0o644)  # safetensors makes files that only their owner may read
            (folder / STATE).write_text(json.dumps(state, allow_nan=False) + "\n", encoding="utf-8")
            (folder / MANIFEST).write_text(to_json(_manifest(folder, state["step"])), encoding="utf-8")
            for name in (*FILES, MANIFEST):
                sync(folder / name)
        return target

    def save_sharded(
        self, mesh: Mesh, *, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: Mapping[str, Any]
    ) -> Path:
        """The same from all ranks of a mesh: each writes what it has, and rank 0 puts the whole into its place.

        Args:
            mesh: The ranks; all of them call this together.
            model: Weights of this rank by name, sharded or whole.
            optimizer: Optimizer state of this rank.
            state: Everything else; rank 0's is saved.

        Raises:
            CheckpointError: A rank could not write; there is nothing new then, on every rank.
        """
        target = self.root / f"step-{state['step']:08d}"
        with ExitStack() as aside:
            folder = mesh.from_first(lambda: _begin_sharded(aside, target))
            write_tensors(model, folder / SHARDED_MODEL)
            write_tensors(optimizer, folder / SHARDED_OPTIMIZER)
            with mesh.agreed():
                if mesh.is_first:
                    _finish_sharded(folder, state)
                    aside.close()
        return target

    def prune(self, keep: int) -> None:
        """Delete all but the newest ``keep``; a deletion cut short never leaves a part under a checkpoint's name."""
        for path in self.paths()[:-keep]:
            aside = path.with_name(f".{path.name}.partial")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            shutil.rmtree(aside)

    def clean(self) -> None:
        """Remove what an interrupted save or deletion left behind. Only for the one process that owns the run."""
        for leftover in self.root.glob(".*.partial"):
            shutil.rmtree(leftover)

    def newest(self, *, fallback: bool = False) -> Checkpoint | None:
        """Read the newest checkpoint; None where there is none at all.

        Args:
            fallback: Whether to go back to the newest one that is whole. Damaged ones on the way are kept under another
                name, ``damaged-step-...``, out of the way of the new one of that step.

        Raises:
            CheckpointError: The newest is damaged and ``fallback`` is false, or all are damaged.
        """
        return self._newest(read_checkpoint, fallback=fallback)

    def newest_path(self, *, fallback: bool = False) -> Path | None:
        """The same without reading it: the folder of the newest checkpoint, verified."""
        return self._newest(_verified, fallback=fallback)

    def _newest(self, read: Callable[[Path], T], *, fallback: bool) -> T | None:
        damaged: dict[Path, CheckpointError] = {}
        for path in reversed(self.paths()):
            try:
                checkpoint = read(path)
            except CheckpointError as error:
                if not fallback:
                    raise CheckpointError(
                        f'{error}; resume="fallback" (--fallback) goes back to the newest whole one'
                    ) from error
                damaged[path] = error
            else:
                self._set_aside(damaged)
                return checkpoint
        if damaged:
            raise CheckpointError(f"no checkpoint in {self.root} is whole: {'; '.join(map(str, damaged.values()))}")
        return None

    def _set_aside(self, damaged: Iterable[Path]) -> None:
        for path in damaged:
            name = f"damaged-{path.name}"
            taken = len(list(self.root.glob(f"{name}*")))
            path.rename(path.with_name(f"{name}-{taken}" if taken else name))


def find_checkpoint(source: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest one of a run folder.

    Raises:
        CheckpointError: There is none.
    """
    if (source / MANIFEST).is_file():
        return source
    paths = Checkpoints(source / CHECKPOINTS).paths()
    if not paths:
        raise CheckpointError(f"{source} is neither a checkpoint nor a run folder with one")
    return paths[-1]


def read_checkpoint(path: Path) -> Checkpoint:
    """Verify a checkpoint and read all of it.

    Raises:
        CheckpointError: It is missing, incomplete, damaged, or of another format.
    """
    verify_checkpoint(path)
    opened = open_checkpoint(path)
    return Checkpoint(
        path=path,
        model=_read_all(path, MODEL, opened.model),
        optimizer=_read_all(path, OPTIMIZER, opened.optimizer),
        state=opened.state,
    )


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint whose tensors are read when they are asked for; whoever calls has verified it.

    Raises:
        CheckpointError: It is missing, incomplete or damaged.
    """
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}") from error
    model, optimizer = open_model(path), StoredTensors(_files_of(path, OPTIMIZER, SHARDED_OPTIMIZER))
    return Checkpoint(path=path, model=model, optimizer=optimizer, state=state)


def open_model(path: Path) -> StoredTensors:
    """The weights of a checkpoint, read when they are asked for; whoever calls has verified it.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    return StoredTensors(_files_of(path, MODEL, SHARDED_MODEL))


def read_model(path: Path) -> dict[str, Tensor]:
    """Verify a checkpoint and read its weights.

    Raises:
        CheckpointError: It is missing, incomplete, damaged, or of another format.
    """
    verify_checkpoint(path)
    return _read_all(path, MODEL, open_model(path))


def verify_checkpoint(path: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        CheckpointError: A file is missing, or its size or SHA-256 is not the recorded one; the message names it.
    """
    recorded = _read_manifest(path)
    for name in dict.fromkeys((*_required(recorded), *recorded)):
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing")
        seen = _fingerprint(file)
        if seen != recorded.get(name):
            raise CheckpointError(
                f"checkpoint {path} is damaged: {name} has {_describe(seen)}, but recorded is "
                f"{_describe(recorded.get(name))}"
            )


def _verified(path: Path) -> Path:
    verify_checkpoint(path)
    return path


def _read_all(path: Path, whole: str, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    try:
        return load_file(path / whole) if (path / whole).is_file() else dict(stored)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}") from error


def _files_of(path: Path, whole: str, folder: str) -> list[Path]:
    """The files of one kind that the manifest lists: one, or one for each rank that had something to write."""
    recorded = _read_manifest(path)
    return [path / name for name in recorded if name == whole or Path(name).parent == Path(folder)]


def _begin_sharded(aside: ExitStack, target: Path) -> Path:
    folder = aside.enter_context(publish_folder(target, replace=False))
    for name in (SHARDED_MODEL, SHARDED_OPTIMIZER):
        (folder / name).mkdir()
    return folder


def _finish_sharded(folder: Path, state: Mapping[str, Any]) -> None:
    """State and manifest, once every rank has written its tensors."""
    (folder / STATE).write_text(json.dumps(state, allow_nan=False) + "\n", encoding="utf-8")
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    manifest = _manifest(folder, state["step"], files=files, layout=SHARDED_FORMAT)
    (folder / MANIFEST).write_text(to_json(manifest), encoding="utf-8")
    for name in (*files, MANIFEST):
        sync(folder / name)


def _manifest(folder: Path, step: int, *, files: Sequence[str] = FILES, layout: int = FORMAT) -> dict[str, Any]:
    return {"format": layout, "step": step, "files": {name: _fingerprint(folder / name) for name in files}}


def _required(recorded: Mapping[str, Any]) -> tuple[str, ...]:
    """Files without which there is no checkpoint, whatever the manifest lists."""
    is_sharded = any(Path(name).parent == Path(SHARDED_MODEL) for name in recorded)
    return (STATE,) if is_sharded else FILES


def _fingerprint(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": file_sha256(file)}


def _describe(fingerprint: Any) -> str:
    if not isinstance(fingerprint, dict):
        return "nothing"
    return f"{fingerprint.get('bytes')} bytes with SHA-256 {str(fingerprint.get('sha256'))[:12]}..."


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}") from error
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} is not readable ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") not in (FORMAT, SHARDED_FORMAT):
        seen = manifest.get("format") if isinstance(manifest, dict) else manifest
        known = f"{FORMAT} and {SHARDED_FORMAT}"
        raise CheckpointError(f"checkpoint {path} has format {seen!r}; this version reads format {known}")
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} lists no files")
    outside = [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} lists {outside[0]}, which lies elsewhere")
    return files
