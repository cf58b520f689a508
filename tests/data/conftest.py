"""Small texts and datasets for the tests of attnres.data."""

from pathlib import Path

import pytest

from attnres.data import Dataset, prepare
from data.texts import TRAIN_TEXT, VALID_TEXT


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    """A train and a valid text file."""
    train, valid = tmp_path / "train.txt", tmp_path / "valid.txt"
    train.write_text(TRAIN_TEXT, encoding="utf-8")
    valid.write_text(VALID_TEXT, encoding="utf-8")
    return train, valid


@pytest.fixture
def dataset(tmp_path: Path, texts: tuple[Path, Path]) -> Dataset:
    """A prepared dataset of those files."""
    return prepare(tmp_path / "dataset", train=[texts[0]], valid=[texts[1]], vocab_size=300)
