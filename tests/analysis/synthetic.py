"""Write run and compare folders with made-up but lifelike numbers, so that reading them back needs no training.

By hand, for a look at the report without training anything: ``python tests/analysis/synthetic.py FOLDER``.
"""

import json
import sys
from pathlib import Path

import numpy as np

ARMS = {
    "prenorm": ("PreNorm", {"type": "PreNorm"}, 0.0, 1.0),
    "block": ("Block AttnRes (S=4)", {"type": "BlockAttnRes", "sublayers_per_block": 4}, -0.031, 1.07),
    "full": ("Full AttnRes", {"type": "FullAttnRes", "read_scale": "mean"}, -0.038, 1.19),
}
"""Arm: label, residual settings, gain in nats, time relative to PreNorm."""


TASTE = np.random.default_rng(7).standard_normal(512)
"""Which sources every site of every run favours."""


def generator(arm: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, *arm.encode()])


def write_comparison(
    folder: Path,
    *,
    arms=("prenorm", "block", "full"),
    seeds=(0, 1, 2),
    sublayers=16,
    sublayers_per_block=4,
    steps=600,
    unfinished=(),
    without_depth=(),
    absent=(),
) -> Path:
    """Write arms x seeds; ``unfinished``, ``without_depth`` and ``absent`` name runs such as ``block-seed1``."""
    folder.mkdir(parents=True)
    runs = {arm: [f"{arm}-seed{seed}" for seed in seeds] for arm in arms}
    content = {
        "format": 1,
        "arms": list(arms),
        "baseline": arms[0],
        "seeds": list(seeds),
        "runs": runs,
        "labels": {arm: ARMS[arm][0].replace("S=4", f"S={sublayers_per_block}") for arm in arms},
    }
    write_json(folder / "compare.json", content)
    for arm in arms:
        for seed, name in zip(seeds, runs[arm], strict=True):
            if name not in absent:
                write_run(
                    folder / name,
                    arm=arm,
                    seed=seed,
                    sublayers=sublayers,
                    sublayers_per_block=sublayers_per_block,
                    steps=steps,
                    stop_at=steps * 2 // 5 if name in unfinished else None,
                    depth=name not in without_depth,
                )
    return folder


def write_run(
    folder: Path, *, arm="block", seed=0, sublayers=16, sublayers_per_block=4, steps=600, stop_at=None, depth=True
) -> Path:
    """Write one run; with ``stop_at`` it stopped at that step and has neither a result nor a measurement of depth."""
    folder.mkdir(parents=True)
    residual = {
        key: sublayers_per_block if key == "sublayers_per_block" else item for key, item in ARMS[arm][1].items()
    }
    write_json(folder / "config.json", config(residual, seed, sublayers, steps))
    write_json(folder / "environment.json", environment(seed))
    records = metrics(arm, seed, steps, stop_at or steps)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if stop_at is None:
        write_json(folder / "result.json", result(records, arm, sublayers))
        if depth:
            write_json(folder / "depth.json", depth_content(arm, seed, sublayers, sublayers_per_block))
    return folder


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2))


def config(residual: dict, seed: int, sublayers: int, steps: int) -> dict:
    return {
        "model": {"family": "llama", "hidden_size": 192, "num_hidden_layers": sublayers // 2, "vocab_size": 4096},
        "residual": residual,
        "data": {"dataset": "data/english", "context": 256, "batch_size": 32},
        "optim": {"matrices": "muon", "lr": 0.004, "schedule": {"type": "WSD", "warmup_steps": 50}, "clip": 1.0},
        "train": {"seed": seed, "steps": steps, "evaluate_every": 25, "precision": "float32"},
    }


def environment(seed: int) -> dict:
    return {
        "commit": "3f1c2ab9d04e",
        "dirty": False,
        "versions": {
            "attnres": "0.1.0",
            "numpy": "2.4.6",
            "python": "3.11.7",
            "torch": "2.13.0",
            "transformers": "5.24.0",
        },
        "platform": "Linux-6.1-x86_64",
        "cpu": "AMD EPYC 9B14",
        "threads": 2,
        "date": f"2026-11-29T10:{10 + seed:02d}:00+00:00",
    }


def metrics(arm: str, seed: int, steps: int, stop_at: int) -> list[dict]:
    """Make a loss that all arms share but for a gain, noise that a seed shares, and a little noise of each run."""
    _, _, gain, slowness = ARMS[arm]
    noise, per_step = generator(arm, seed), 32 * 256
    offset = 0.02 * np.random.default_rng(seed).standard_normal()
    gain += 0.003 * noise.standard_normal() * (arm != "prenorm")
    records = []
    for step in range(stop_at + 1):
        share = step / steps
        loss = 2.9 + offset * min(1, 9 * share) + 5.4 / (1 + 26 * share) ** 0.75 + gain * share / (share + 0.2)
        seconds = round(0.31 * slowness * step * (1 + 0.01 * seed), 4)
        common = {"step": step, "tokens": step * per_step, "seconds": seconds}
        if step and step % 2 == 0:
            jitter = 0.06 * noise.standard_normal()
            speed = per_step / (0.31 * slowness * (1 + 0.01 * seed))
            more = {"lr": 0.004, "grad_norm": 0.7, "tokens_per_second": speed}
            records.append({"kind": "train", **common, "loss": loss - 0.04 + jitter, **more})
        if step % 25 == 0:
            loss += 0.002 * noise.standard_normal()
            records.append({"kind": "valid", **common, "loss": loss, "bits_per_byte": loss / 3.4 / np.log(2)})
    return records


def result(records: list[dict], arm: str, sublayers: int) -> dict:
    last = [record for record in records if record["kind"] == "valid"][-1]
    extra = 0 if arm == "prenorm" else 2 * 192 * (sublayers + 1)
    return {
        "valid_loss": last["loss"],
        "bits_per_byte": last["bits_per_byte"],
        "steps": last["step"],
        "tokens": last["tokens"],
        "tokens_per_second": [record for record in records if record["kind"] == "train"][-1]["tokens_per_second"],
        "seconds": last["seconds"],
        "peak_memory_bytes": ((900 + (0 if arm == "prenorm" else 140)) * 2**20),
        "parameters": 4_300_000 + extra,
        "extra_parameters": extra,
    }


def depth_content(arm: str, seed: int, n: int, sublayers_per_block: int) -> dict:
    noise = generator(arm, seed)
    index = np.arange(1, n + 1)
    bumps = np.where(index % 2, 0.8, 1.2) * np.exp(0.05 * noise.standard_normal(n))
    growth = 0.3 * 1.12**index if arm == "prenorm" else 0.6 - 0.25 * np.cos(index * 2 * np.pi / sublayers_per_block)
    growth = np.full(n, 0.35) if arm == "full" else growth
    gradient = 3e-3 * 0.9**index if arm == "prenorm" else np.full(n, 6e-4 if arm == "block" else 4e-4)
    ends = block_ends(n, sublayers_per_block) if arm == "block" else []
    return {
        "num_sublayers": n,
        "sublayers": ["attention" if i % 2 else "mlp" for i in index],
        "tokens": 16384,
        "output_magnitude": (bumps * growth).tolist(),
        "input_magnitude": [0.02, *np.cumsum(bumps * growth * (1 if arm == "prenorm" else 0.1)).tolist()],
        "gradient_magnitude": (bumps * gradient).tolist(),
        "mixing_matrix": mixing(arm, noise, n, ends).tolist(),
        "block_ends": ends,
    }


def block_ends(n: int, sublayers_per_block: int) -> list[int]:
    return [*range(sublayers_per_block, n, sublayers_per_block), n]


def mixing(arm: str, noise: np.random.Generator, n: int, ends: list[int]) -> np.ndarray:
    """Make weights that favour the embedding and the newest source; every sublayer of a block has its block's."""
    if arm == "prenorm":
        return np.tril(np.ones((n + 1, n + 1)))
    matrix = np.zeros((n + 1, n + 1))
    for site in range(n + 1):
        closed = [end for end in ends if end <= site]
        starts = [0, *closed] if ends else list(range(site + 1))
        groups = [[0], *(list(range(a + 1, b + 1)) for a, b in zip(starts, [*starts[1:], site], strict=True) if b > a)]
        score = 0.8 * TASTE[: len(groups)] + 0.3 * noise.standard_normal(len(groups))
        score[0] += 0.6
        score[-1] += 1.2
        for group, weight in zip(groups, np.exp(score) / np.exp(score).sum(), strict=True):
            matrix[site, group] = weight
    return matrix


if __name__ == "__main__":
    write_comparison(Path(sys.argv[1]), sublayers=32, sublayers_per_block=8)
