"""Read run folders and compare folders.

Tables, figures and the report are rebuilt from these files alone, so that a result can be looked at again years later
and on another machine. Everything is checked here, once: what comes after may rely on it. A run that was stopped is
read as far as it got; a file that is damaged is refused by name.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from attnres.analysis.runs import Arm, Array, Comparison, Curve, Depth, Run, RunResult
from attnres.errors import AttnResError, CheckpointError, ConfigError, DataError

COMPARE_FORMAT = 1
"""The only layout of compare.json that exists so far."""

_CURVE_FIELDS = ("step", "tokens", "loss", "seconds")

_T = TypeVar("_T")


def load_run(folder: Path | str) -> Run:
    """Read one run folder.

    Only ``config.json`` must be there: a run that has just begun, or was killed, is read as far as it got.

    Raises:
        CheckpointError: There is no such folder.
        ConfigError: ``config.json`` is missing or damaged.
        DataError: Another file of the folder is damaged.
    """
    folder = _existing(folder)
    config = _read_object(folder / "config.json", ConfigError)
    result = _optional(folder / "result.json", _result)
    records = _read_records(folder / "metrics.jsonl", torn_end_is_normal=result is None)
    return Run(
        name=folder.resolve().name,
        config=config,
        environment=_optional(folder / "environment.json", lambda content, _: content) or {},
        train=_curve(records, "train"),
        valid=_curve(records, "valid"),
        result=result,
        depth=_optional(folder / "depth.json", _depth),
    )


def load_comparison(folder: Path | str) -> Comparison:
    """Read a compare folder, or a lone run folder as a comparison of one arm.

    Raises:
        CheckpointError: There is no such folder, or none of its runs has one.
        ConfigError: ``compare.json`` or a ``config.json`` is missing, damaged or contradicts itself.
        DataError: Another file of a run is damaged.
    """
    folder = _existing(folder)
    if (folder / "compare.json").is_file():
        return _comparison(folder)
    if (folder / "config.json").is_file():
        return _lone_run(folder)
    raise ConfigError(f"{folder}: holds neither compare.json nor config.json; expected a compare or run folder")


def _comparison(folder: Path) -> Comparison:
    path = folder / "compare.json"
    content = _read_object(path, ConfigError)
    if content.get("format") != COMPARE_FORMAT:
        raise ConfigError(f"{path}: format is {content.get('format')!r}; this version reads {COMPARE_FORMAT}")
    arms, seeds = _list_of(path, content, "arms", str), _list_of(path, content, "seeds", int)
    if content.get("baseline") not in arms:
        raise ConfigError(f"{path}: baseline {content.get('baseline')!r} is not one of the arms {', '.join(arms)}")
    comparison = Comparison(
        name=folder.resolve().name,
        arms=tuple(_arm(path, content, arm, seeds) for arm in arms),
        seeds=tuple(seeds),
        baseline=content["baseline"],
        jobs=content["jobs"] if isinstance(content.get("jobs"), int) else 1,
    )
    if not comparison.runs:
        raise CheckpointError(f"{folder}: none of the runs that compare.json names has a folder")
    return comparison


def _arm(path: Path, content: Mapping[str, Any], arm: str, seeds: Sequence[int]) -> Arm:
    names = _list_of(path, _mapping(path, content, "runs"), arm, str)
    if len(names) != len(seeds):
        raise ConfigError(f"{path}: arm {arm} has {len(names)} runs for {len(seeds)} seeds")
    for name in names:
        if name in ("", ".", "..") or Path(name).name != name:
            raise ConfigError(f"{path}: run {name!r} of arm {arm} is not the name of a folder beside it")
    there = {seed: name for seed, name in zip(seeds, names, strict=True) if (path.parent / name).is_dir()}
    labels = _mapping(path, content, "labels") if "labels" in content else {}
    runs = {seed: load_run(path.parent / name) for seed, name in there.items()}
    depths = {run.depth.num_sublayers for run in runs.values() if run.depth is not None}
    if len(depths) > 1:
        raise DataError(
            f"{path}: the runs of arm {arm} have {sorted(depths)} sublayers; expected the same number in all"
        )
    return Arm(
        name=arm,
        label=str(labels.get(arm, arm)),
        runs=runs,
        absent=tuple(name for name in names if name not in there.values()),
    )


def _lone_run(folder: Path) -> Comparison:
    run = load_run(folder)
    residual, train = run.config.get("residual"), run.config.get("train")
    label = residual.get("type", run.name) if isinstance(residual, dict) else run.name
    seed = train.get("seed") if isinstance(train, dict) else None
    seed = seed if isinstance(seed, int) else 0
    arm = Arm(name=run.name, label=str(label), runs={seed: run})
    return Comparison(name=run.name, arms=(arm,), seeds=(seed,), baseline=None)


def _existing(folder: Path | str) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such run folder")
    return folder


def _read_object(path: Path, error: type[AttnResError]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror})") from problem
    except ValueError as problem:  # damaged JSON, or bytes that are not UTF-8
        raise error(f"{path}: is not JSON ({problem})") from problem
    if not isinstance(content, dict):
        raise error(f"{path}: holds a {type(content).__name__}; expected an object")
    return content


def _optional(path: Path, parse: Callable[[dict[str, Any], Path], _T]) -> _T | None:
    return parse(_read_object(path, DataError), path) if path.is_file() else None


def _mapping(path: Path, content: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {key} is {value!r}; expected an object")
    return value


def _list_of(path: Path, content: Mapping[str, Any], key: str, kind: type[_T]) -> list[_T]:
    value = content.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, kind) for item in value):
        raise ConfigError(f"{path}: {key} is {value!r}; expected a list of {kind.__name__}, at least one")
    if len(set(value)) != len(value):
        raise ConfigError(f"{path}: {key} is {value!r}; each may occur once")
    return value


def _number(path: Path, content: Mapping[str, Any], key: str) -> float:
    value = content.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{path}: {key} is {value!r}; expected a number")
    return value


def _result(content: dict[str, Any], path: Path) -> RunResult:
    def whole(key: str) -> int:
        value = _number(path, content, key)
        if not math.isfinite(value):
            raise DataError(f"{path}: {key} is {value!r}; expected a whole number")
        return int(value)

    return RunResult(
        valid_loss=float(_number(path, content, "valid_loss")),
        bits_per_byte=None if content.get("bits_per_byte") is None else float(_number(path, content, "bits_per_byte")),
        steps=whole("steps"),
        tokens=whole("tokens"),
        tokens_per_second=float(_number(path, content, "tokens_per_second")),
        seconds=float(_number(path, content, "seconds")),
        peak_memory_bytes=None if content.get("peak_memory_bytes") is None else whole("peak_memory_bytes"),
        parameters=whole("parameters"),
        extra_parameters=whole("extra_parameters"),
    )


def _read_records(path: Path, *, torn_end_is_normal: bool) -> list[dict[str, Any]]:
    """Read the lines of a metrics file; a run that was killed may have left half a line at its end."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    torn = lines.pop()  # empty if the file ends with a line break, as it should
    if torn.strip() and not torn_end_is_normal:
        lines.append(torn)
    return [_record(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    where = Path(f"{path}, line {number}")
    try:
        record = json.loads(line)
    except ValueError as problem:
        raise DataError(f"{where}: is not JSON ({problem})") from problem
    if not isinstance(record, dict):
        raise DataError(f"{where}: holds a {type(record).__name__}; expected an object")
    if record.get("kind") in ("train", "valid"):
        for key in _CURVE_FIELDS:
            _number(where, record, key)
    return record


def _curve(records: Sequence[Mapping[str, Any]], kind: str) -> Curve:
    """Collect one kind of record by step; a step logged again after a resume replaces the earlier record."""
    by_step = {record["step"]: record for record in records if record.get("kind") == kind}
    rows = [[by_step[step][key] for key in _CURVE_FIELDS] for step in sorted(by_step)]
    steps, tokens, loss, seconds = np.array(rows, dtype=np.float64).reshape(len(rows), len(_CURVE_FIELDS)).T
    return Curve(steps=steps, tokens=tokens, loss=loss, seconds=seconds)


def _depth(content: dict[str, Any], path: Path) -> Depth:
    n = int(_number(path, content, "num_sublayers"))
    kinds, ends = content.get("sublayers"), content.get("block_ends", [])
    if n < 1 or not isinstance(kinds, list) or len(kinds) != n:
        raise DataError(f"{path}: sublayers is {kinds!r}; expected one name for each of {n} sublayers")
    if not isinstance(ends, list) or not all(isinstance(end, int) and 0 < end <= n for end in ends):
        raise DataError(f"{path}: block_ends is {ends!r}; expected sublayer counts from 1 to {n}")
    return Depth(
        sublayers=tuple(str(kind) for kind in kinds),
        tokens=int(_number(path, content, "tokens")),
        output_magnitude=_floats(path, content, "output_magnitude", (n,)),
        input_magnitude=_floats(path, content, "input_magnitude", (n + 1,)),
        gradient_magnitude=_floats(path, content, "gradient_magnitude", (n,)),
        mixing_matrix=_floats(path, content, "mixing_matrix", (n + 1, n + 1)),
        block_ends=tuple(sorted(set(ends))),
    )


def _floats(path: Path, content: Mapping[str, Any], key: str, shape: tuple[int, ...]) -> Array:
    try:
        values = np.array(content.get(key), dtype=np.float64)
    except (TypeError, ValueError) as problem:
        raise DataError(f"{path}: {key} is not an array of numbers ({problem})") from problem
    if values.shape != shape:
        raise DataError(f"{path}: {key} has shape {list(values.shape)}; expected {list(shape)}")
    return values
