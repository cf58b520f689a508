"""``attnres compare``: train several residual strategies from the same start and compare them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnres.cli.console import show_results
from attnres.cli.options import DEFAULT_PRESET, PresetName, base_config, joined, print_plan
from attnres.cli.parsing import parse
from attnres.experiments.compare import Comparison, compare, seeds_from
from attnres.optim import OptimConfig
from attnres.parallel.config import ParallelConfig, is_first_process
from attnres.train import DataConfig, ModelConfig, RunConfig, TrainConfig


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parse(_command(arguments), arguments, command="compare")


def _command(arguments: Sequence[str]) -> Any:
    base = base_config(arguments)

    def compare_command(
        *,
        arms: list[str],
        out: Path,
        seeds: int = 1,
        preset: PresetName = DEFAULT_PRESET,
        model: ModelConfig = base.model,
        data: DataConfig = base.data,
        optim: OptimConfig = base.optim,
        train: TrainConfig = base.train,
        parallel: ParallelConfig = base.parallel,
        jobs: int = 1,
        resume: bool = False,
        dry_run: bool = False,
    ) -> None:
        """Train several residual strategies from the same weights on the same data, and compare them.

        Prints a table and writes it with a report into OUT: report.html, table.md, table.json. PreNorm is the baseline
        where it is an arm, else the first arm.

        Args:
            arms: Strategies (see attnres strategies), with settings as in block:num_blocks=4,read_scale=sum.
            out: Folder to make, with one run folder per arm and seed.
            seeds: Number of seeds; arms are paired by seed, and three or more give an interval worth reading.
            preset: Where all other settings start from.
            model: The decoder.
            data: What it reads.
            optim: How it is updated.
            train: How long, how much at a time, and on what; seeds are counted up from --train.seed.
            parallel: The processes that train each run together, one run after the other, started by torchrun
                --nproc-per-node N -m attnres compare ...
            jobs: Runs at a time. More than one finishes sooner and distorts the measured speeds; set --train.threads.
            resume: Go on with a comparison that was broken off, or add arms and seeds to it.
            dry_run: Print the resolved config of each arm with parameters, memory and FLOPs per token,
                on a mesh what each rank would hold as well, and stop.
        """
        del preset
        config = RunConfig(residual=base.residual, model=model, data=data, optim=optim, train=train, parallel=parallel)
        comparison = Comparison(arms=tuple(arms), seeds=seeds_from(seeds, train.seed), base=config)
        if dry_run:
            if is_first_process():
                _print_plans(comparison)
            return
        with joined(list(comparison.of_first_seed()), out, resume=resume) as (mesh, goes_on):
            compare(comparison, out, resume=goes_on, jobs=jobs, mesh=mesh)
        if is_first_process():
            show_results(out)

    return compare_command


def _print_plans(comparison: Comparison) -> None:
    """What each arm will cost."""
    for run in comparison.of_first_seed():
        print_plan(run)
