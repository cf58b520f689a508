"""``attnres train``: train one model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from attnres.cli.options import DEFAULT_PRESET, PresetName, base_config, joined, print_plan, residual_default
from attnres.cli.parsing import parse
from attnres.experiments.run import run
from attnres.optim import OptimConfig
from attnres.parallel.config import ParallelConfig, is_first_process
from attnres.residual import STRATEGIES
from attnres.train import DataConfig, ModelConfig, Resume, RunConfig, TrainConfig


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parse(_command(arguments), arguments, command="train")


def _command(arguments: Sequence[str]) -> Any:
    """The command's function; its defaults are the preset's, and its options those of the strategy named."""
    base = base_config(arguments)
    name, strategy = residual_default(arguments, base.residual)
    strategy_type, names = type(strategy), Literal[tuple(STRATEGIES)]

    def train(
        *,
        out: Path,
        preset: PresetName = DEFAULT_PRESET,
        residual_name: Annotated[names, tyro.conf.arg(name="residual")] = name,  # pyright: ignore[reportInvalidTypeForm]
        residual: strategy_type = strategy,  # pyright: ignore[reportInvalidTypeForm]
        model: ModelConfig = base.model,
        data: DataConfig = base.data,
        optim: OptimConfig = base.optim,
        train: TrainConfig = base.train,
        parallel: ParallelConfig = base.parallel,
        resume: bool = False,
        fallback: bool = False,
        dry_run: bool = False,
    ) -> None:
        """Train one model into a run folder.

        Args:
            out: Run folder to make, or with --resume to go on with.
            preset: Where all other settings start from.
            residual_name: Residual strategy; its settings are the --residual.* options.
            residual: Settings of the strategy.
            model: The decoder.
            data: What it reads.
            optim: How it is updated.
            train: How long, how much at a time, and on what.
            parallel: The processes it runs on, started by torchrun --nproc-per-node N -m attnres train ...
            resume: Go on with the run in OUT from its newest checkpoint, with that run's settings. More steps, and
                how often it is evaluated and saved, may be asked for; what decides its numbers may not change.
            fallback: With --resume, skip checkpoints that are damaged.
            dry_run: Print the resolved config with parameters, memory and FLOPs per token,
                on a mesh what each rank would hold as well, and stop.
        """
        del preset, residual_name
        config = RunConfig(residual=residual, model=model, data=data, optim=optim, train=train, parallel=parallel)
        if dry_run:
            if is_first_process():
                print_plan(config)
            return
        with joined([config], out, resume=resume) as (mesh, goes_on):
            how: Resume = "fallback" if goes_on and fallback else goes_on
            result = run(config, out, resume=how, mesh=mesh)
        if is_first_process():
            print(
                f"{out}: step {result['steps']:,}, validation loss {result['valid_loss']:.4f} nats/token, "
                f"{result['bits_per_byte']:.4f} bits/byte, {result['tokens_per_second']:,.0f} tokens/s"
            )

    return train
