import lzma
from importlib.resources import files

import pytest

from attnres.data import prepare


@pytest.fixture(scope="session")
def novel(tmp_path_factory):
    """A few chapters of real text as bytes."""
    folder = tmp_path_factory.mktemp("novel")
    packed = files("attnres.data").joinpath("bundled", "train.txt.xz").read_bytes()
    beginning = lzma.decompress(packed)[:120_000].decode("utf-8", errors="ignore")
    (folder / "train.txt").write_text(beginning[:100_000], encoding="utf-8")
    (folder / "valid.txt").write_text(beginning[100_000:], encoding="utf-8")
    return prepare(folder / "data", train=[folder / "train.txt"], valid=[folder / "valid.txt"], tokenizer="bytes")
