import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from attnres.data import END_OF_TEXT, Dataset, byte_tokenizer, open_dataset
from attnres.errors import ConfigError, DataError
from data.texts import TRAIN_TEXT, VALID_TEXT


def change_record(folder: Path, **entries: object) -> None:
    path = folder / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def change_shard_record(folder: Path, **entries: object) -> None:
    splits = json.loads((folder / "dataset.json").read_text())["splits"]
    change_record(folder, splits=splits | {"train": splits["train"] | entries})


def flip_one_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def other_tokenizer_of_the_same_size(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokens = json.loads(path.read_text())
    vocab = tokens["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(tokens))


def test_opened_dataset_is_the_prepared_one(dataset: Dataset):
    again = open_dataset(str(dataset.folder))
    assert (again.vocab_size, again.tokenizer_name, again.source) == (300, "bpe-300", "train.txt; valid: valid.txt")
    for split, text in (("train", TRAIN_TEXT), ("valid", VALID_TEXT)):
        np.testing.assert_array_equal(again.split(split).tokens, dataset.split(split).tokens)
        assert again.tokenizer().decode(again.split(split).tokens.tolist()) == text + END_OF_TEXT
        assert again.bytes_per_token(split) == len(text.encode()) / len(again.split(split))


def test_record_has_the_documented_entries(dataset: Dataset):
    record = json.loads((dataset.folder / "dataset.json").read_text())
    assert {**record, "splits": None, "tokenizer_sha256": None} == {
        "format": 1,
        "tokenizer": "bpe-300",
        "tokenizer_sha256": None,
        "vocab_size": 300,
        "dtype": "uint16",
        "splits": None,
        "source": "train.txt; valid: valid.txt",
    }
    train = dataset.split("train")
    assert record["splits"]["train"] == {
        "file": "train.bin",
        "tokens": len(train),
        "bytes": len(TRAIN_TEXT.encode()),
        "sha256": train.sha256,
    }


def test_folder_can_be_moved(dataset: Dataset, tmp_path: Path):
    moved = tmp_path / "elsewhere"
    shutil.move(dataset.folder, moved)
    assert len(open_dataset(moved).split("train")) == len(dataset.split("train"))


def test_unknown_split_is_refused(dataset: Dataset):
    with pytest.raises(ConfigError, match=r"^split is 'test'; this dataset has train, valid$"):
        dataset.split("test")


DAMAGES = {
    "no-folder": (shutil.rmtree, "is not a dataset folder: it has no dataset.json"),
    "no-record": (lambda f: (f / "dataset.json").unlink(), "is not a dataset folder: it has no dataset.json"),
    "record-not-json": (lambda f: (f / "dataset.json").write_text("{"), "dataset.json is damaged"),
    "record-not-text": (lambda f: (f / "dataset.json").write_bytes(b"\xff"), "dataset.json is damaged"),
    "record-a-list": (lambda f: (f / "dataset.json").write_text("[]"), r"has format \[\]; this version reads format 1"),
    "unknown-format": (lambda f: change_record(f, format=2), "has format 2; this version reads format 1"),
    "unknown-type": (lambda f: change_record(f, dtype="int8"), "damaged: entry dtype='int8'"),
    "vocabulary-a-string": (lambda f: change_record(f, vocab_size="300"), "damaged: entry vocab_size='300'"),
    "no-splits": (lambda f: change_record(f, splits={}), "damaged: entry 'train' is missing"),
    "file-outside": (lambda f: change_shard_record(f, file="../x.bin"), r"damaged: entry file='\.\./x\.bin'"),
    "no-tokens": (lambda f: change_shard_record(f, tokens=0), "damaged: entry tokens=0"),
    "no-tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer file .*tokenizer\.json is missing"),
    "tokenizer-damaged": (lambda f: (f / "tokenizer.json").write_text("{}"), r"tokenizer\.json cannot be read"),
    "tokenizer-of-other-size": (
        lambda f: byte_tokenizer().save(str(f / "tokenizer.json")),
        "has 257 tokens, but the shards were written with 300",
    ),
    "tokenizer-of-same-size": (other_tokenizer_of_the_same_size, "is not the tokenizer that wrote the shards"),
    "no-shard": (lambda f: (f / "valid.bin").unlink(), r"shard .*valid\.bin is missing"),
    "shard-truncated": (
        lambda f: (f / "train.bin").write_bytes((f / "train.bin").read_bytes()[:-2]),
        r"train\.bin has \d+ bytes, but \d+ tokens of uint16 are \d+ bytes",
    ),
    "shard-corrupted": (lambda f: flip_one_bit(f / "train.bin", 1001), r"train\.bin is corrupted: its SHA-256 is"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_dataset_is_refused_in_one_line(dataset: Dataset, damage, message):
    damage(dataset.folder)
    with pytest.raises(DataError, match=message) as caught:
        open_dataset(dataset.folder)
    assert len(str(caught.value).splitlines()) == 1
