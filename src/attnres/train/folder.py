"""The run folder: made in one step, owned by one process, resumed only by the run that made it."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnres.data.folders import publish_folder
from attnres.errors import ConfigError
from attnres.train.config import RunConfig
from attnres.train.environment import describe_environment
from attnres.train.files import replace_text, sync, to_json

CONFIG = "config.json"
ENVIRONMENT = "environment.json"
TOKENIZER = "tokenizer.json"
METRICS = "metrics.jsonl"
RESULT = "result.json"

CHANGEABLE = frozenset(
    {
        "train.steps",
        "train.eval_every",
        "train.checkpoint_every",
        "train.keep_checkpoints",
        "train.trackers",
        "data.dataset",  # where the data lies; what it is, is compared by checksum
        "model.pretrained",  # the same
    }
)
"""Settings that may differ when a run is resumed, as those of ``parallel`` may. All others decide numbers."""


def check_new(folder: Path) -> None:
    """Raise unless nothing is at ``folder``.

    Raises:
        ConfigError: Something is there.
    """
    if os.path.lexists(folder):
        raise ConfigError(f"run folder {folder} exists; allowed: a new path, or resuming the run in it")


def create_run_folder(folder: Path, config: RunConfig, tokenizer: Path | None) -> None:
    """Make the folder with config, environment and tokenizer in it, all at once.

    Raises:
        ConfigError: Something is there by now; it stays as it is.
    """
    try:
        with publish_folder(folder, replace=False) as partial:
            (partial / CONFIG).write_text(to_json(config.to_dict()), encoding="utf-8")
            (partial / ENVIRONMENT).write_text(to_json(describe_environment(config)), encoding="utf-8")
            if tokenizer is not None:
                shutil.copyfile(tokenizer, partial / TOKENIZER)
            for file in partial.iterdir():
                sync(file)
    except FileExistsError:
        check_new(folder)
        raise


def load_run_config(folder: Path | str) -> RunConfig:
    """Read the resolved config of a run folder.

    Raises:
        ConfigError: There is none, it is not JSON, or a key or value in it is not allowed.
    """
    path = Path(folder) / CONFIG
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{folder} is not a run folder: cannot read {CONFIG} ({error.strerror})") from error
    except ValueError as error:  # not JSON, or not even text
        raise ConfigError(f"{path} is damaged: {error}") from error
    if isinstance(settings, dict) and "model_type" in settings:
        raise ConfigError(f"{folder} is a Hugging Face folder ({CONFIG} has a model_type); allowed is a run folder")
    return RunConfig.from_dict(settings)


def check_same_run(folder: Path, asked: RunConfig) -> None:
    """Raise unless ``asked`` continues the run in ``folder``: same numbers, steps the same or more.

    Raises:
        ConfigError: A setting that decides numbers differs; the message has the field and both values.
    """
    saved = load_run_config(folder)
    for name, before, now in differences(saved, asked):
        if name not in CHANGEABLE and not name.startswith("parallel."):
            raise ConfigError(f"cannot resume {folder}: {name} is {before!r} there, but {now!r} was asked for")
    if asked.train.steps < saved.train.steps:
        raise ConfigError(
            f"cannot resume {folder}: train.steps is {saved.train.steps} there, but {asked.train.steps} was asked for; "
            f"allowed: {saved.train.steps} or more"
        )


def update_config(folder: Path, config: RunConfig) -> None:
    """Record the config of a resumed run, and drop a result that is no longer the run's."""
    saved = load_run_config(folder)
    if saved.train.steps != config.train.steps:
        (folder / RESULT).unlink(missing_ok=True)
    if saved != config:
        replace_text(folder / CONFIG, to_json(config.to_dict()))


def clean_run_folder(folder: Path) -> None:
    """Remove files that a kill left half written. Only for the one process that owns the run."""
    for leftover in folder.glob(".*.partial"):
        leftover.unlink()


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Own a run folder; the system lets go of it however the process ends.

    Raises:
        ConfigError: Another process owns it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"run folder {folder} is in use by another process") from error
        yield
    finally:
        os.close(descriptor)


def differences(one: RunConfig, other: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """The fields in which two configs differ, each with both values; a strategy's kind before its settings."""
    before, now = _flat(one.to_dict()), _flat(other.to_dict())
    for name in sorted(before.keys() | now.keys(), key=lambda name: (not name.endswith(".type"), name)):
        if before.get(name) != now.get(name):
            yield name, before.get(name), now.get(name)


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
