"""Fine-tuning a trained PreNorm model as it is, and converted to Block AttnRes: what does conversion bring or cost?

Three arms start from the same trained weights and see the same tokens in the same order: PreNorm with all weights
trained, the converted model with only its pseudo-queries and key weights trained, and the converted model with all
weights trained. The seed decides the order of the data. Run it, or go on with it, by

    python -m attnres.experiments.conversion --pretrained DIR --data DIR --out runs/conversion

Training is under bf16 autocast where the hardware has it, evaluation in float32, so that a difference at the start
would be one of the functions and not of rounding. Besides the table and report of every comparison, the folder then has
`DEPTH_WEIGHTS`, what the converted arms read before and after, and a figure of it.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnres.analysis import write_report, write_tables
from attnres.analysis.numbers import decimal, signed
from attnres.analysis.statistics import PairedDifference, paired_difference
from attnres.analysis.svg import drawing, to_svg
from attnres.data import open_dataset
from attnres.errors import AttnResError
from attnres.experiments.arms import arm_label, parse_arm
from attnres.experiments.compare import COMPARE, Comparison, compare, seeds_from
from attnres.experiments.run import DEPTH, DEPTH_AT_START
from attnres.optim import OptimConfig
from attnres.residual import PreNorm
from attnres.train import DataConfig, ModelConfig, RunConfig, TrainConfig, read_metrics
from attnres.train.files import replace_text, to_json

LEARNING_RATE = 1e-4
"""Peak learning rate of the trained weights, chosen for PreNorm alone by 30 steps with a seed of their own."""
DEPTH_LEARNING_RATE = 3e-4
"""Peak learning rate of pseudo-queries and key weights, chosen likewise for the arm that trains nothing else."""

DEPTH_WEIGHTS = "depth_weights.json"
FIGURE = "depth_weights.svg"

Matrix = list[list[float]]


def conversion(*, pretrained: str, dataset: str, vocab_size: int, steps: int = 64, seed: int = 0) -> RunConfig:
    """The run that every arm varies: steps of 1,024 tokens by AdamW, no weight decay.

    Args:
        pretrained: Folder of the trained model.
        dataset: Path of a dataset folder made with the model's tokenizer.
        vocab_size: Token ids of model and dataset.
        steps: Optimizer steps.
        seed: The first seed.
    """
    return RunConfig(
        model=ModelConfig(pretrained=pretrained),
        residual=PreNorm(),
        data=DataConfig(dataset=dataset, vocab_size=vocab_size, context=128),
        optim=OptimConfig(
            optimizer="adamw",
            lr=LEARNING_RATE,
            depth_lr_scale=DEPTH_LEARNING_RATE / LEARNING_RATE,
            weight_decay=0.0,
            warmup_steps=min(8, steps // 2),
        ),
        train=TrainConfig(
            steps=steps,
            batch_size=8,
            eval_every=0,
            eval_sequences=64,
            eval_precision="fp32",
            checkpoint_every=(steps + 1) // 2,
            keep_checkpoints=1,
            threads=1,
            seed=seed,
        ),
    )


def arms(sublayers_per_block: int = 6) -> tuple[str, str, str]:
    """The arms as words: PreNorm, converted and only its depth parameters trained, converted and all trained."""
    block = f"block:sublayers_per_block={sublayers_per_block},read_scale=sum"
    return "prenorm", f"{block}@train_only=depth", block


def comparison(base: RunConfig, *, sublayers_per_block: int = 6, seeds: int = 3) -> Comparison:
    """The three arms from the same weights, on the same data in the same order."""
    return Comparison(arms=arms(sublayers_per_block), seeds=seeds_from(seeds, base.train.seed), base=base)


def run_study(study: Comparison, out: Path, *, jobs: int = 1, progress: bool = True, isolate: bool = True) -> None:
    """Run the study, or go on with it, and write everything that is read from it.

    Args:
        study: What `comparison` gives.
        out: Its folder.
        jobs: Runs at a time.
        progress: Whether to show progress on standard error.
        isolate: Whether each run has a process of its own.

    Raises:
        AttnResError: A run cannot be made; those before it are whole.
    """
    compare(study, out, resume=out.exists(), jobs=jobs, progress=progress, isolate=isolate)
    write_report(out)
    write_tables(out)
    write_depth_weights(out)


def table(folder: Path) -> str:
    """Held-out loss of each arm before and after, as Markdown.

    Args:
        folder: A finished comparison of `comparison`.
    """
    listed = json.loads((folder / COMPARE).read_text(encoding="utf-8"))
    before = {arm: _losses(folder, listed, arm, first=True) for arm in listed["arms"]}
    after = {arm: _losses(folder, listed, arm, first=False) for arm in listed["arms"]}
    lines = [
        "| arm | at the start | at the end | change (95 %) | difference to PreNorm at the end (95 %) |",
        "|---|---:|---:|---:|---:|",
    ]
    for arm in listed["arms"]:
        change = _told(paired_difference(after[arm], before[arm]))
        others = None if arm == listed["baseline"] else paired_difference(after[arm], after[listed["baseline"]])
        start, end = (decimal(float(np.mean(list(by_seed[arm].values())))) for by_seed in (before, after))
        lines.append(f"| {listed['labels'][arm]} | {start} | {end} | {change} | {_told(others)} |")
    return "\n".join(lines) + "\n"


def _losses(folder: Path, listed: Mapping[str, Any], arm: str, *, first: bool) -> dict[int, float]:
    """Held-out loss by seed, of the first or the last evaluation."""
    by_seed: dict[int, float] = {}
    for seed, run in zip(listed["seeds"], listed["runs"][arm], strict=True):
        valid = [row["loss"] for row in read_metrics(folder / run) if row["kind"] == "valid"]
        by_seed[seed] = valid[0 if first else -1]
    return by_seed


def _told(difference: PairedDifference | None) -> str:
    if difference is None:
        return ""
    half = "" if difference.half_width is None else f" ± {decimal(difference.half_width)}"
    return signed(difference.mean) + half


def depth_weights(measured: Mapping[str, Any]) -> Matrix:
    """What each site of a block strategy reads, from the mixing matrix of a run.

    Args:
        measured: Contents of ``depth.json``.

    Returns:
        For each site, the output read last, the weights of embedding, finished blocks and the partial sum, oldest
        first, which sum to 1.
    """
    ends = [0, *measured["block_ends"]]
    rows: Matrix = []
    for site, mixing in enumerate(measured["mixing_matrix"]):
        sources = [mixing[0], *(mixing[end + 1] for end in ends if end < site)]
        rows.append([weight / sum(sources) for weight in sources])
    return rows


def distance_from_even(rows: Matrix) -> float:
    """Mean over sites of the share of weight that an even mix would give to other sources (total variation)."""
    return float(np.mean([sum(abs(weight - 1 / len(row)) for weight in row) / 2 for row in rows]))


def write_depth_weights(folder: Path) -> None:
    """Write `DEPTH_WEIGHTS` and `FIGURE` of a finished comparison: the converted arms before and after."""
    listed = json.loads((folder / COMPARE).read_text(encoding="utf-8"))
    written: dict[str, Any] = {}
    for arm in listed["arms"]:
        if isinstance(parse_arm(arm), PreNorm):
            continue
        runs = [folder / run for run in listed["runs"][arm]]
        before, after = ([_read_weights(run / name) for run in runs] for name in (DEPTH_AT_START, DEPTH))
        written[arm] = {
            "label": arm_label(arm),
            "distance_from_even": {
                "start": list(map(distance_from_even, before)),
                "end": list(map(distance_from_even, after)),
            },
            "start": _mean(before),
            "end": _mean(after),
        }
    replace_text(folder / DEPTH_WEIGHTS, to_json(written))
    replace_text(folder / FIGURE, figure(written) + "\n")


def _read_weights(path: Path) -> Matrix:
    return depth_weights(json.loads(path.read_text(encoding="utf-8")))


def _mean(matrices: Sequence[Matrix]) -> Matrix:
    return [np.mean(rows, axis=0).tolist() for rows in zip(*matrices, strict=True)]


def figure(written: Mapping[str, Any]) -> str:
    """Draw the depth weights relative to an even mix: once before, and for each arm after."""
    from matplotlib.colors import LogNorm

    first = next(iter(written.values()))
    panels = {"converted, before": first["start"], **{f"after: {arm['label']}": arm["end"] for arm in written.values()}}
    relative = {title: _relative(rows) for title, rows in panels.items()}
    most = max(float(np.nanmax(np.abs(np.log2(np.maximum(values, 2**-5))))) for values in relative.values())
    limit = 2.0 ** min(5.0, max(1.0, np.ceil(most)))
    with drawing(3.0 * len(panels), 5.2) as drawn:
        columns = np.ravel(drawn.subplots(1, len(panels), sharey=True))
        norm = LogNorm(1 / limit, limit, clip=True)
        for axes, (title, values) in zip(columns, relative.items(), strict=True):
            axes.grid(visible=False)
            axes.imshow(values, cmap="PuOr_r", norm=norm, interpolation="none", aspect="auto")
            axes.set_title(title.replace(", train_only", ",\ntrain_only"))
            axes.set_xlabel("source: embedding, blocks")
            blocks = range(2, values.shape[1], 2)
            axes.set_xticks([0, *blocks], ["emb", *map(str, blocks)])
        columns[0].set_ylabel("site: input of sublayer, last the output")
        bar = drawn.colorbar(columns[0].images[0], ax=columns.tolist(), shrink=0.6)
        bar.ax.minorticks_off()
        bar.set_label("depth weight ÷ even mix")
        return to_svg(drawn, key="depth-weights", title="Depth weights before and after fine-tuning")


def _relative(rows: Matrix) -> Any:
    values = np.full((len(rows), max(map(len, rows))), np.nan)
    for site, row in enumerate(rows):
        values[site, : len(row)] = np.array(row) * len(row)
    return values


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study, or go on with it, and print its table."""
    parser = argparse.ArgumentParser(
        prog="python -m attnres.experiments.conversion",
        description="A trained PreNorm model fine-tuned as it is, and converted to Block AttnRes.",
    )
    parser.add_argument("--pretrained", required=True, help="Hugging Face folder of the trained model")
    parser.add_argument("--data", required=True, help="dataset folder made with the model's tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder of the comparison; an old one is gone on with")
    parser.add_argument("--seeds", type=int, default=3, help="seeds (default: 3)")
    parser.add_argument("--steps", type=int, default=64, help="optimizer steps of 1,024 tokens (default: 64)")
    parser.add_argument("--sublayers-per-block", type=int, default=6, help="sublayers of a block (default: 6)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each (default: 1)")
    options = parser.parse_args(arguments)
    try:
        vocab_size = open_dataset(options.data).vocab_size
        base = conversion(
            pretrained=options.pretrained, dataset=options.data, vocab_size=vocab_size, steps=options.steps
        )
        study = comparison(base, sublayers_per_block=options.sublayers_per_block, seeds=options.seeds)
        run_study(study, options.out, jobs=options.jobs)
    except AttnResError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    print(table(options.out))


if __name__ == "__main__":
    main()
