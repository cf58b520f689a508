"""Arms by seeds: every strategy from the same weights, on the same data in the same order.

One run folder per arm and seed, and a ``compare.json`` that says which belong together; table and report are made from
those files alone. Runs go seed by seed, so that a comparison that is broken off is still paired, and each in a process
of its own, so that memory and speed of one do not depend on the ones before it.
"""

import json
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import torch

from attnres.errors import ConfigError
from attnres.experiments.arms import arm_folder, arm_label, arm_optim, parse_arm
from attnres.experiments.models import build_model, hf_config, open_data, self_contained
from attnres.experiments.run import Progress, run
from attnres.optim import freeze_base
from attnres.parallel.mesh import Mesh
from attnres.residual import PreNorm, reads
from attnres.train import RunConfig, load_run_config, resolve
from attnres.train.batch import check_data
from attnres.train.files import replace_text, to_json
from attnres.train.folder import check_same_run

COMPARE = "compare.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Which runs make a comparison.

    Raises:
        ConfigError: There is no arm or seed, one is given twice, or an arm does not fit the model.
    """

    arms: tuple[str, ...]
    """Strategies as words (see `attnres.experiments.arms`), with optimizer settings of their own where they have any;
    the baseline is PreNorm, or the first if it is absent."""
    seeds: tuple[int, ...]
    """Seeds of weights and data order; each arm runs with each."""
    base: RunConfig
    """Everything but strategy, seed, and the optimizer settings that an arm has of its own."""

    def __post_init__(self) -> None:
        for name, values in (("arms", self.arms), ("seeds", self.seeds)):
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name} are {list(values)}; allowed: at least one, each once")
        folders = [arm_folder(arm, 0) for arm in self.arms]
        if len(set(folders)) < len(folders):
            raise ConfigError(f"arms are {list(self.arms)}; two of them have the same folder name")
        depth = 2 * hf_config(self.base.model, self.base.data).num_hidden_layers
        for arm in self.arms:
            strategy = parse_arm(arm)
            try:
                reads(depth, strategy)
                replace(self.base, residual=strategy, optim=arm_optim(arm, self.base.optim))
            except ConfigError as error:
                raise ConfigError(f"arm {arm!r}: {error}") from error

    @property
    def baseline(self) -> str:
        """The arm that the others are compared with."""
        return _baseline(self.arms)

    def runs(self) -> Iterator[tuple[str, RunConfig]]:
        """Folder name and config of each run, seed by seed."""
        for seed in self.seeds:
            for arm in self.arms:
                train = replace(self.base.train, seed=seed)
                optim = arm_optim(arm, self.base.optim)
                run = replace(self.base, residual=parse_arm(arm), optim=optim, train=train)
                yield arm_folder(arm, seed), self_contained(run)

    def of_first_seed(self) -> Iterator[RunConfig]:
        """One run of each arm."""
        return (config for _, config in self.runs() if config.train.seed == self.seeds[0])

    def to_dict(self) -> dict[str, Any]:
        """Contents of ``compare.json``."""
        return {
            "format": FORMAT,
            "arms": list(self.arms),
            "baseline": self.baseline,
            "seeds": list(self.seeds),
            "runs": {arm: [arm_folder(arm, seed) for seed in self.seeds] for arm in self.arms},
            "labels": {arm: arm_label(arm) for arm in self.arms},
        }


def compare(
    comparison: Comparison,
    out: Path,
    *,
    resume: bool = False,
    jobs: int = 1,
    progress: bool = True,
    isolate: bool = True,
    mesh: Mesh | None = None,
) -> None:
    """Train every run of a comparison into ``out``.

    Args:
        comparison: The runs.
        out: A new folder, or with ``resume`` that of a comparison to go on with: finished runs are kept, broken-off
            ones go on, and arms and seeds may have been added.
        resume: Whether ``out`` may exist.
        jobs: Runs at a time, each in a process of its own. More than one distorts the speeds that are measured.
        progress: Whether to show progress on standard error.
        isolate: Whether each run has a process of its own.
        mesh: The processes that train each run together, one run after the other, all of them with this call.

    Raises:
        ConfigError: ``out`` exists and ``resume`` is false, it holds runs that are not this comparison's, there are no
            jobs, or several on a mesh.
        AttnResError: A run cannot be made; those before it are whole.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}; allowed: 1 or more")
    if mesh is None:
        waiting = _begin(comparison, out, resume=resume, jobs=jobs)
    else:
        if jobs > 1:
            raise ConfigError(f"jobs is {jobs} on a mesh, whose processes train one run together; allowed: 1")
        waiting = mesh.from_first(lambda: _begin(comparison, out, resume=resume, jobs=jobs))
    runs = [(config, out / name, exists) for name, config in comparison.runs() for exists in waiting.get(name, ())]
    if isolate and mesh is None:
        tasks = [(config, folder) for config, folder, _ in runs]
        _run_isolated(tasks, jobs, progress="plain" if progress and jobs > 1 else progress)
        return
    for config, folder, exists in runs:
        run(config, folder, resume=exists, progress=progress, mesh=mesh)


def _begin(comparison: Comparison, out: Path, *, resume: bool, jobs: int) -> dict[str, tuple[bool]]:
    """Check, make or extend the folder, and name the runs that are not finished, each with whether it has begun."""
    if out.exists() and not resume:
        raise ConfigError(f"comparison folder {out} exists; allowed: a new path, or --resume to go on with it")
    if out.exists() and not (out / COMPARE).is_file() and any(out.iterdir()):
        raise ConfigError(f"{out} has no {COMPARE}, so there is no comparison to go on with")
    _check(comparison, out)
    out.mkdir(parents=True, exist_ok=True)
    replace_text(out / COMPARE, to_json(_merged(out, {**comparison.to_dict(), "jobs": jobs})))
    return {
        name: ((out / name).exists(),) for name, config in comparison.runs() if not _is_finished(out / name, config)
    }


def seeds_from(count: int, first: int = 0) -> tuple[int, ...]:
    """A number of seeds, counted up from the first.

    Raises:
        ConfigError: The number is below 1.
    """
    if count < 1:
        raise ConfigError(f"seeds is {count}; allowed: 1 or more")
    return tuple(range(first, first + count))


def _check(comparison: Comparison, out: Path) -> None:
    """Raise for whatever would stop a run, before anything is written or trained."""
    data = open_data(comparison.base.data)
    with torch.device("meta"):
        check_data(build_model(comparison.base, weights=False), data, comparison.base)
        for config in comparison.of_first_seed():
            if config.optim.train_only == "depth":
                freeze_base(build_model(config, weights=False))
    is_there = (out / COMPARE).exists()
    old = [(arm, out / name) for arm, names in _read(out)["runs"].items() for name in names] if is_there else []
    settled = [(out / name, resolve(config)) for name, config in comparison.runs()]
    for arm, folder in old:
        if not folder.exists():
            continue
        saved = load_run_config(folder)
        asked = next((config for path, config in settled if path == folder), None)
        if asked is None:  # a run of another arm or seed: everything else has to be the same
            optim = arm_optim(arm, comparison.base.optim)
            train = replace(settled[0][1].train, seed=saved.train.seed)
            asked = replace(settled[0][1], residual=saved.residual, optim=optim, train=train)
        check_same_run(folder, asked)


def _read(out: Path) -> dict[str, Any]:
    """The comparison that is in a folder."""
    path = out / COMPARE
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return {key: listed[key] for key in ("arms", "seeds", "labels", "runs")}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error!r}") from error


def _run_isolated(waiting: Sequence[tuple[RunConfig, Path]], jobs: int, progress: Progress) -> None:
    """Each run in a fresh process, ``jobs`` at a time; the first error stops those that have not begun."""
    failed = threading.Event()

    def one(config: RunConfig, folder: Path) -> None:
        if failed.is_set():
            return
        try:
            _run_in_process(config, folder, progress)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(one, config, folder) for config, folder in waiting]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            failed.set()


def _run_in_process(config: RunConfig, folder: Path, progress: Progress) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_end_with_parent) as process:
        process.submit(run, config, folder, resume=folder.exists(), progress=progress).result()


def _end_with_parent() -> None:
    """End this process when the one that started it is killed, instead of training on unseen."""
    parent = parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _is_finished(folder: Path, config: RunConfig) -> bool:
    if not (folder / "result.json").is_file():
        return False
    return replace(load_run_config(folder), parallel=config.parallel) == resolve(config)


def _baseline(arms: Sequence[str]) -> str:
    prenorm = [arm for arm in arms if isinstance(parse_arm(arm), PreNorm)]
    return prenorm[0] if prenorm else arms[0]


def _merged(out: Path, new: dict[str, Any]) -> dict[str, Any]:
    """With the arms and seeds of an earlier call into the same folder, so that no run is forgotten."""
    if not (out / COMPARE).exists():
        return new
    old = _read(out)
    arms = [*old["arms"], *(arm for arm in new["arms"] if arm not in old["arms"])]
    seeds = sorted({*old["seeds"], *new["seeds"]})
    return {
        **new,
        "arms": arms,
        "baseline": _baseline(arms),
        "seeds": seeds,
        "runs": {arm: [arm_folder(arm, seed) for seed in seeds] for arm in arms},
        "labels": {**old["labels"], **new["labels"]},
    }
