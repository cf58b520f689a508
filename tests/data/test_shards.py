from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnres.data import Dataset, shards
from attnres.data.shards import dtype_for, file_sha256, open_shard, write_shard
from attnres.data.text import Piece
from attnres.data.tokenizer import END_OF_TEXT, byte_tokenizer, train_bpe
from attnres.errors import DataError
from data.texts import TRAIN_TEXT, VALID_TEXT

BPE = train_bpe([TRAIN_TEXT], 300)


@settings(deadline=None, max_examples=40)
@given(
    documents=st.lists(st.text(max_size=40), min_size=1, max_size=6),
    dtype=st.sampled_from(["uint16", "uint32"]),
    batch=st.integers(1, 50),
)
def test_shard_decodes_to_its_documents(tmp_path_factory, documents, dtype, batch):
    folder = tmp_path_factory.mktemp("shard")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_BATCH_CHARACTERS", batch)
        record = write_shard(folder / "x.bin", (Piece(text, True) for text in documents), BPE, dtype)
    shard = open_shard(folder, "train", record, dtype)
    assert BPE.decode(shard.tokens.tolist()) == "".join(text + END_OF_TEXT for text in documents)
    assert shard.num_bytes == len("".join(documents).encode())


def test_end_of_text_stands_behind_documents_and_not_between_pieces(tmp_path: Path):
    pieces = [Piece("ab", False), Piece("c", True), Piece("d", False)]
    record = write_shard(tmp_path / "x.bin", pieces, byte_tokenizer(), "uint16")
    assert np.fromfile(tmp_path / "x.bin", "<u2").tolist() == [98, 99, 100, 0, 101]
    assert (record.tokens, record.bytes, record.sha256) == (5, 4, file_sha256(tmp_path / "x.bin"))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_type_is_the_smallest_that_holds_every_id(vocab_size, dtype):
    assert dtype_for(vocab_size) == dtype
    assert np.iinfo(shards.DTYPES[dtype]).max >= vocab_size - 1


def test_text_is_encoded_a_batch_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "_BATCH_CHARACTERS", 100)
    tokenizer, lengths = byte_tokenizer(), []

    class Recorder:
        """A tokenizer that notes how much text it is given at once."""

        def encode_batch_fast(self, texts, **options):
            lengths.append(sum(map(len, texts)))
            return tokenizer.encode_batch_fast(texts, **options)

        def token_to_id(self, token):
            return tokenizer.token_to_id(token)

    pieces = (Piece("x" * 20, False) for _ in range(52))
    write_shard(tmp_path / "x.bin", pieces, Recorder(), "uint16")
    assert lengths == [100] * 10 + [40]


def test_windows_are_inputs_and_the_next_token_of_each(dataset: Dataset):
    shard = dataset.split("train")
    starts = np.array([0, 7, len(shard) - 6])
    inputs, targets = shard.windows(starts, context=5)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.shape == targets.shape == (3, 5)
    for row, start in enumerate(starts):
        np.testing.assert_array_equal(inputs[row], shard.tokens[start : start + 5])
        np.testing.assert_array_equal(targets[row], shard.tokens[start + 1 : start + 6])


@pytest.mark.parametrize("start", [-1, 1])
def test_window_outside_the_shard_is_refused(dataset: Dataset, start):
    shard = dataset.split("valid")
    last = len(shard) - 6
    outside = np.array([0, start if start < 0 else last + start])
    with pytest.raises(DataError, match=rf"leave the valid shard; allowed: 0 to {last}"):
        shard.windows(outside, context=5)


def test_tokens_are_mapped_and_cannot_be_written(dataset: Dataset):
    tokens = dataset.split("train").tokens
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_bytes_per_token_counts_the_text(dataset: Dataset):
    shard = dataset.split("valid")
    assert dataset.bytes_per_token("valid") == shard.bytes_per_token == len(VALID_TEXT.encode()) / len(shard)
