"""``attnres data prepare``: text to a tokenizer and token shards."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from attnres.cli.parsing import parse
from attnres.data import Dataset, HubText, prepare, prepare_hub
from attnres.errors import ConfigError

USAGE = "usage: attnres data prepare OUT [OPTIONS]\n\nPrepare text for training; see attnres data prepare --help"


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
    elif not arguments or arguments[0] != "prepare":
        seen = repr(arguments[0]) if arguments else "missing"
        raise ConfigError(f"data command is {seen}; allowed: prepare")
    else:
        parse(prepare_command, arguments[1:], command="data prepare")


def prepare_command(
    out: Path,
    /,
    *,
    train: list[Path] | None = None,
    valid: list[Path] | None = None,
    hub: str | None = None,
    hub_name: str | None = None,
    split: str = "train",
    valid_split: str | None = None,
    column: str = "text",
    vocab_size: int = 4096,
    tokenizer: Literal["bpe", "bytes"] = "bpe",
    tokenizer_file: Path | None = None,
    valid_fraction: float = 0.02,
    overwrite: bool = False,
) -> None:
    """Prepare text for training: a tokenizer and checked token shards in one folder.

    Text comes from files, from a Hugging Face dataset (with the datasets extra), or, where neither is given, from the
    bundled corpus.

    Args:
        out: Folder to make.
        train: Text files, or folders of .txt files.
        valid: Held-out text; without it the end of the training text is held out.
        hub: Name of a Hugging Face dataset, or path of a local one.
        hub_name: Configuration of the dataset.
        split: Split to train on.
        valid_split: Split to hold out; without it the end of the training split is.
        column: Column with the text.
        vocab_size: Token ids of the BPE tokenizer.
        tokenizer: A byte-level BPE trained on the text, or plain bytes.
        tokenizer_file: A tokenizer.json, or a folder with one, to use instead: that of a trained model.
        valid_fraction: Share of the text that is held out where no other is given.
        overwrite: Replace a dataset that is there.
    """
    options = {
        "vocab_size": vocab_size,
        "tokenizer": tokenizer,
        "tokenizer_file": tokenizer_file,
        "valid_fraction": valid_fraction,
    }
    if hub is None:
        dataset = prepare(out, train=train, valid=valid, overwrite=overwrite, **options)
    elif train or valid:
        raise ConfigError("train or valid files and hub are both given; allowed: files, or a dataset")
    else:
        held_out = None if valid_split is None else HubText(path=hub, name=hub_name, split=valid_split, column=column)
        text = HubText(path=hub, name=hub_name, split=split, column=column)
        dataset = prepare_hub(out, text, held_out, overwrite=overwrite, **options)
    describe(dataset)


def describe(dataset: Dataset) -> None:
    """Print what is in a dataset folder."""
    print(f"{dataset.folder}: {dataset.tokenizer_name}, {dataset.vocab_size:,} token ids")
    for name in ("train", "valid"):
        shard = dataset.split(name)
        sizes = f"{len(shard):>12,} tokens  {shard.num_bytes:>12,} bytes"
        print(f"  {name:<5}  {sizes}  {shard.bytes_per_token:.2f} bytes/token")
