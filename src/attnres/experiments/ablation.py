"""The paper's Table 4 as one recipe: what each part of Attention Residuals is worth, arm by arm.

The paper's model has 32 sublayers, and so has this one; everything else is as small as two CPU cores ask for. The
hyperparameters are the baseline's and shared by all arms, as in the paper. Run it, or go on with it, by

    python -m attnres.experiments.ablation --out runs/ablation --data runs/data/english

and `table` sets the result beside the paper's numbers.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnres.analysis import write_report, write_tables
from attnres.analysis.numbers import MINUS, decimal, signed
from attnres.errors import AttnResError
from attnres.experiments.compare import Comparison, compare, seeds_from
from attnres.optim import OptimConfig
from attnres.residual import PreNorm
from attnres.train import DataConfig, ModelConfig, RunConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class PaperArm:
    """One row of the paper's Table 4."""

    arm: str
    """The strategy as a word (see `attnres.experiments.arms`)."""
    name: str
    """The paper's name of it."""
    loss: float
    """The paper's validation loss."""


TABLE_4 = (
    PaperArm(arm="prenorm", name="Baseline (PreNorm)", loss=1.766),
    PaperArm(arm="denseformer", name="DenseFormer", loss=1.767),
    PaperArm(arm="mhc", name="mHC", loss=1.747),
    PaperArm(arm="full", name="AttnRes Full", loss=1.737),
    PaperArm(arm="input-dependent", name="Full, input-dependent query", loss=1.731),
    PaperArm(arm="input-independent", name="Full, input-independent mixing", loss=1.749),
    PaperArm(arm="sigmoid", name="Full, sigmoid", loss=1.741),
    PaperArm(arm="no-key-norm", name="Full, without RMSNorm", loss=1.743),
    PaperArm(arm="window:window=8", name="Full, window 1+8", loss=1.764),
    PaperArm(arm="block:sublayers_per_block=4", name="AttnRes Block (S=4)", loss=1.746),
    PaperArm(arm="multi-head:sublayers_per_block=4,heads=16", name="Block, 16 heads", loss=1.752),
    PaperArm(arm="no-key-norm:sublayers_per_block=4", name="Block, without RMSNorm", loss=1.750),
)
"""The paper's ablation: 436 M active parameters, 32 sublayers, 87.9 B tokens, one run each (arXiv 2603.15031)."""


def ablation(*, dataset: str = "bundled", steps: int = 400, seed: int = 0) -> RunConfig:
    """The run that every arm varies: 32 sublayers, 1.0 M parameters, 0.8 M tokens.

    Args:
        dataset: Path of a dataset folder, or ``"bundled"``.
        steps: Optimizer steps of 2,048 tokens.
        seed: The first seed.
    """
    return RunConfig(
        model=ModelConfig(
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=16,
            num_attention_heads=2,
            num_key_value_heads=2,
            rms_norm_eps=1e-8,
        ),
        residual=PreNorm(),
        data=DataConfig(dataset=dataset, vocab_size=4096, context=128),
        optim=OptimConfig(optimizer="muon", lr=LEARNING_RATE, warmup_steps=30),
        train=TrainConfig(
            steps=steps,
            batch_size=16,
            eval_every=steps // 6 or 1,
            eval_sequences=128,
            checkpoint_every=steps // 2,
            precision="fp32",
            threads=1,
            seed=seed,
        ),
    )


LEARNING_RATE = 8e-3
"""Chosen for the baseline alone and shared by all arms: of 4e-3, 8e-3 and 1.6e-2 (validation loss 4.887, 4.789 and
4.782 after 450 steps, seed 0) the lower of the two that are as good."""


def comparison(*, dataset: str = "bundled", seeds: int = 3, steps: int = 400) -> Comparison:
    """Every arm of Table 4 from the same weights, on the same data in the same order."""
    arms = tuple(row.arm for row in TABLE_4)
    return Comparison(arms=arms, seeds=seeds_from(seeds), base=ablation(dataset=dataset, steps=steps))


def table(folder: Path) -> str:
    """The result beside the paper's numbers, as Markdown.

    Args:
        folder: A comparison of `comparison`, with its ``table.json``.
    """
    rows = {row["arm"]: row for row in json.loads((folder / "table.json").read_text(encoding="utf-8"))}
    lines = [
        "| arm | loss (nats/token) | difference to PreNorm (95 %) | paper: loss | paper: difference |",
        "|---|---:|---:|---:|---:|",
    ]
    for paper in TABLE_4:
        if paper.arm in rows:
            lines.append(_line(paper, rows[paper.arm]))
    return "\n".join(lines) + "\n"


def _line(paper: PaperArm, row: dict[str, Any]) -> str:
    ours, theirs = "", ""
    if row["difference"] is not None:
        mean, half = row["difference"]["mean"], row["difference"]["half_width"]
        ours = signed(mean) if half is None else f"{signed(mean)} ± {decimal(half)}"
    if paper is not TABLE_4[0]:
        theirs = f"{paper.loss - TABLE_4[0].loss:+.3f}".replace("-", MINUS)
    return f"| {paper.name} | {decimal(row['valid_loss'])} | {ours} | {paper.loss:.3f} | {theirs} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study, or go on with it, and print its table."""
    parser = argparse.ArgumentParser(
        prog="python -m attnres.experiments.ablation", description="The ablation of the paper, Table 4."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the comparison; an old one is gone on with")
    parser.add_argument("--data", default="bundled", help="dataset folder (default: the bundled corpus)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds (default: 3)")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of 2,048 tokens (default: 400)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each (default: 2)")
    options = parser.parse_args(arguments)
    try:
        study = comparison(dataset=options.data, seeds=options.seeds, steps=options.steps)
        compare(study, options.out, resume=options.out.exists(), jobs=options.jobs)
    except AttnResError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    write_report(options.out)
    write_tables(options.out)
    print(table(options.out))


if __name__ == "__main__":
    main()
