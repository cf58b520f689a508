"""A run small enough for tests: two layers, a 300-token vocabulary, a few hundred words of text."""

from dataclasses import replace
from pathlib import Path

from attnres.data import prepare
from attnres.experiments.presets import tiny

WORDS = ["the", "of", "and", "to", "in", "he", "she", "it", "was", "that", "had", "not", "with", "her", "his", "for"]


def text(count, seed):
    state, words = seed, []
    for _ in range(count):
        state = (1103515245 * state + 12345) % 2**31
        words.append(WORDS[(state >> 16) % len(WORDS)])
    return " ".join(words) + ".\n"


def dataset(folder: Path):
    """A dataset folder of plain bytes."""
    (folder / "train.txt").write_text(text(3000, 1))
    (folder / "valid.txt").write_text(text(600, 2))
    return prepare(folder / "data", train=[folder / "train.txt"], valid=[folder / "valid.txt"], tokenizer="bytes")


def small_run(data, *, steps=6, **train):
    """A run of a second."""
    base = tiny()
    model = replace(
        base.model, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    settings = {"steps": steps, "batch_size": 2, "eval_every": 3, "eval_sequences": 4, "checkpoint_every": 2,
                "precision": "fp32", "threads": 1}  # fmt: skip
    return replace(
        base,
        model=model,
        data=replace(base.data, dataset=str(data.folder), vocab_size=data.vocab_size, context=16),
        optim=replace(base.optim, warmup_steps=1),
        train=replace(base.train, **{**settings, **train}),
    )
