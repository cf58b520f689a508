"""Checkpoints on disk: whole or absent, verified before use, and free of anything that runs code.

    checkpoints/step-00000500/
        model.safetensors      weights, tied ones once
        optimizer.safetensors  moments and step counts, keyed by parameter name
        state.json             step, data position, random generators, callbacks
        manifest.json          size and SHA-256 of each of the above

A checkpoint is written aside in the same folder, flushed, and renamed into place. A process killed at any moment leaves
at most a hidden ``.*.partial`` folder, which the next start removes.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from attnres.data.folders import publish_folder
from attnres.data.shards import file_sha256
from attnres.errors import CheckpointError
from attnres.train.files import sync, to_json

FORMAT = 1
"""Version of the layout; raised when an older reader would misread it."""

CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints in a run folder."""

MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
FILES = (MODEL, OPTIMIZER, STATE)


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
                save_file(contiguous, folder / name, metadata={"format": "pt"})
                (folder / name).chmod(0o644)  # safetensors makes files that only their owner may read
            (folder / STATE).write_text(json.dumps(state, allow_nan=False) + "\n", encoding="utf-8")
            (folder / MANIFEST).write_text(to_json(_manifest(folder, state["step"])), encoding="utf-8")
            for name in (*FILES, MANIFEST):
                sync(folder / name)
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
        damaged: dict[Path, CheckpointError] = {}
        for path in reversed(self.paths()):
            try:
                checkpoint = read_checkpoint(path)
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
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        optimizer = load_file(path / OPTIMIZER)
        return Checkpoint(path=path, model=load_file(path / MODEL), optimizer=optimizer, state=state)
    except (ValueError, OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}") from error


def read_model(path: Path) -> dict[str, Tensor]:
    """Verify a checkpoint and read its weights.

    Raises:
        CheckpointError: It is missing, incomplete, damaged, or of another format.
    """
    verify_checkpoint(path)
    try:
        return load_file(path / MODEL)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}") from error


def verify_checkpoint(path: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        CheckpointError: A file is missing, or its size or SHA-256 is not the recorded one; the message names it.
    """
    recorded = _read_manifest(path)
    for name in FILES:
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing")
        seen = _fingerprint(file)
        if seen != recorded.get(name):
            raise CheckpointError(
                f"checkpoint {path} is damaged: {name} has {_describe(seen)}, but recorded is "
                f"{_describe(recorded.get(name))}"
            )


def _manifest(folder: Path, step: int) -> dict[str, Any]:
    return {"format": FORMAT, "step": step, "files": {name: _fingerprint(folder / name) for name in FILES}}


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
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        seen = manifest.get("format") if isinstance(manifest, dict) else manifest
        raise CheckpointError(f"checkpoint {path} has format {seen!r}; this version reads format {FORMAT}")
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} lists no files")
    return files
