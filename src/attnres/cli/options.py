"""What `train` and `compare` share: the preset that other options change, and the processes that torchrun started."""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from attnres.cli.console import wide_console
from attnres.cli.parsing import peek
from attnres.errors import AttnResError, ConfigError
from attnres.experiments.arms import strategy_of
from attnres.experiments.compare import COMPARE
from attnres.experiments.describe import describe
from attnres.experiments.layout import RankShare, lay_out
from attnres.experiments.presets import preset
from attnres.experiments.run import check_layout
from attnres.parallel.config import is_first_process, is_launched, restarts
from attnres.parallel.failures import RankFailure
from attnres.parallel.mesh import JobRecord, Mesh, job_record, launched_mesh
from attnres.residual import STRATEGIES, Strategy
from attnres.train import RunConfig, load_run_config, resolve_device

PresetName = Literal["tiny", "small"]
DEFAULT_PRESET: PresetName = "tiny"


def base_config(arguments: Sequence[str]) -> RunConfig:
    """What the options start from: the preset that is named, else with ``--resume`` the run itself.

    Raises:
        ConfigError: There is no such preset, or no such run.
    """
    name, out = peek(arguments, "--preset"), peek(arguments, "--out")
    if name is None and out is not None and "--resume" in arguments and not (Path(out) / COMPARE).is_file():
        return load_run_config(Path(out))
    return preset(name or DEFAULT_PRESET)


def residual_default(arguments: Sequence[str], default: Strategy) -> tuple[str, Strategy]:
    """The strategy that ``--residual NAME`` names, whose settings are then options of their own; else the default.

    Raises:
        ConfigError: There is no such strategy.
    """
    name = peek(arguments, "--residual")
    if name is None:
        return default.short_name, default
    if name not in STRATEGIES:
        word, colon, _ = name.partition(":")
        if colon and word in STRATEGIES:
            raise ConfigError(
                f"residual is {name!r}; allowed is the word {word!r} alone, settings are --residual.* options"
            )
        raise ConfigError(f"residual is {name!r}; allowed: {', '.join(STRATEGIES)}")
    by_count = any(argument.split("=")[0].replace("_", "-") == "--residual.num-blocks" for argument in arguments)
    return name, strategy_of(name, {"num_blocks": 1} if by_count and name == "block" else {})


def print_plan(config: RunConfig) -> None:
    """The resolved config and what it costs, for ``--dry-run``; on a mesh with a table, beside the JSON."""
    costs = {"plan": dataclasses.asdict(describe(config))}
    if config.parallel.size == 1 and config.parallel.stages == 1:
        print(json.dumps({**config.to_dict(), **costs}, indent=2))
        return
    shares = lay_out(config)
    found = {**costs, "layout": [dataclasses.asdict(share) for share in shares]}
    print(json.dumps({**config.to_dict(), **found}, indent=2), flush=True)
    console = wide_console(stderr=True)
    console.print(_layout_table(shares))
    console.print("\n".join(_layout_notes(config)), soft_wrap=True)


def _layout_table(shares: Sequence[RankShare]) -> Any:
    """What each rank would hold, a line for each stage."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for title in ("ranks", "stage", "sublayers", "layers", "parameters", "receives"):
        table.add_column(title, justify="left" if title == "receives" else "right", no_wrap=title != "receives")
    for share in shares:
        for stage in share.stages:
            numbers = (_span(share.ranks), str(stage.stage), _span(stage.sublayers), _span(stage.layers))
            table.add_row(*numbers, f"{stage.parameters:,}", stage.receives)
    return table


def _layout_notes(config: RunConfig) -> Iterator[str]:
    layout = config.parallel
    staged = f", schedule {layout.settled_schedule}, cache {layout.cache}" if layout.stages > 1 else ""
    yield f"{config.residual.label}, {layout.size} processes: {layout.mesh}{staged}"
    if layout.stages > 1:
        yield "receives: over the hop to the stage, in each pass; E is the embedding, b4 the block of sublayers up to 4"
    if layout.is_sharded:
        yield f"parameters: of one data rank, which has 1 / {layout.data} of each weight (fsdp)"
    if layout.tensor > 1:
        yield (
            f"parameters: of one tensor rank, which has 1 / {layout.tensor} of the weights of attention, MLP and a "
            f"head apart, all of the embedding; the tokens between sublayers are divided by {layout.tensor}, too"
        )


def _span(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}-{ends[1]}"


@contextmanager
def joined(runs: Sequence[RunConfig], out: Path, *, resume: bool) -> Iterator[tuple[Mesh | None, bool]]:
    """Join the processes that torchrun started, where it did.

    Args:
        runs: What they will train, one after the other, on one mesh, which has to fit them and each of the runs.
        out: Folder of the run or comparison.
        resume: Whether it was asked to go on with it.

    Yields:
        The mesh (None for a single process), and whether to go on with what is in ``out``: as asked, or because
        torchrun has started this job again, which had begun it, after a rank was lost.

    Raises:
        ConfigError: The mesh does not fit the processes, the layers or the passes.
        RankFailure: Another rank failed or was lost.
    """
    config = runs[0]
    if not is_launched():
        check_layout(runs)
        yield None, resume
        return
    record = job_record()
    if record is not None and restarts() and record.has("refused"):
        raise SystemExit(2)  # the first start has said why, and nothing has changed since
    try:
        check_layout(runs)
        resume = _goes_on(record, out, asked=resume) or resume
        with launched_mesh(config.parallel, device=resolve_device(config.train.device)) as mesh:
            yield mesh, resume
    except AttnResError as error:
        if record is not None and not isinstance(error, RankFailure):
            record.note("refused")
        raise


def _goes_on(record: JobRecord | None, out: Path, *, asked: bool) -> bool:
    """Whether this is a later start of a job that has begun ``out`` itself; the first start takes note of that."""
    key = f"begun {out.resolve()}"
    if record is None:
        return False
    if restarts():
        return record.has(key) and out.exists()
    if is_first_process() and (asked or not os.path.lexists(out)):
        record.note(key)
    return False
