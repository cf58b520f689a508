"""``attnres train``: train one model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from attnres.cli.options import DEFAULT_PRESET, PresetName, base_config, print_plan, residual_default
from attnres.cli.parsing import parse
from attnres.experiments.run import run
from attnres.optim import OptimConfig
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
            resume: Go on with the run in OUT from its newest checkpoint, with that run's settings. More steps, and
                how often it is evaluated and saved, may be asked for; what decides its numbers may not change.
            fallback: With --resume, skip checkpoints that are damaged.
            dry_run: Print the resolved config with parameters, memory and FLOPs per token, and stop.
        """
        del preset, residual_name
        config = RunConfig(residual=residual, model=model, data=data, optim=optim, train=train)
        if dry_run:
            print_plan(config)
            return
        how: Resume = "fallback" if resume and fallback else resume
        result = run(config, out, resume=how)
        print(
            f"{out}: step {result['steps']:,}, validation loss {result['valid_loss']:.4f} nats/token, "
            f"{result['bits_per_byte']:.4f} bits/byte, {result['tokens_per_second']:,.0f} tokens/s"
        )

    return train
