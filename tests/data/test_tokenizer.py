import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from attnres.data import END_OF_TEXT, END_OF_TEXT_ID, byte_tokenizer, load_tokenizer, train_bpe
from attnres.data.tokenizer import existing_tokenizer
from attnres.errors import DataError
from data.texts import TRAIN_TEXT

TOKENIZERS = {"bpe": train_bpe([TRAIN_TEXT], 320), "bytes": byte_tokenizer()}
each_tokenizer = pytest.mark.parametrize("kind", list(TOKENIZERS))


@each_tokenizer
@settings(deadline=None, max_examples=200)
@given(text=st.text())
@example(text=f"before{END_OF_TEXT} after")
@example(text=" \n\n \t\u00a0\u2028x  's\r\n\x00\ufeff")
@example(text="e\u0301 vs \u00e9, 한글 क्ष 👩‍👩‍👧")
def test_decoding_gives_back_any_text(kind, text):
    ids = TOKENIZERS[kind].encode(text).ids
    assert TOKENIZERS[kind].decode(ids) == text
    assert END_OF_TEXT_ID not in ids


@given(content=st.binary(max_size=50))
def test_byte_tokenizer_numbers_bytes_from_one(content):
    text = content.decode("utf-8", "ignore")
    assert TOKENIZERS["bytes"].encode(text).ids == [byte + 1 for byte in text.encode()]


@each_tokenizer
def test_end_of_text_is_token_zero(kind):
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID == 0
    assert tokenizer.decode([END_OF_TEXT_ID]) == END_OF_TEXT


def test_vocabularies_have_the_size_asked_for():
    assert TOKENIZERS["bpe"].get_vocab_size() == 320
    assert TOKENIZERS["bytes"].get_vocab_size() == 257


def test_bpe_shortens_the_text_it_was_trained_on():
    bpe, plain = (len(TOKENIZERS[kind].encode(TRAIN_TEXT).ids) for kind in ("bpe", "bytes"))
    assert bpe < plain / 2


def test_training_twice_gives_the_same_file():
    lines = TRAIN_TEXT.splitlines(keepends=True)
    first, again = (train_bpe(pieces, 320).to_str() for pieces in ([TRAIN_TEXT], lines))
    assert first == again


def test_short_text_gives_a_smaller_vocabulary_and_a_warning():
    with pytest.warns(UserWarning, match="vocab_size is 4096, but the text is so short that BPE learned only 25"):
        tokenizer = train_bpe(["abc"], 4096)
    assert tokenizer.get_vocab_size() == 259


@each_tokenizer
def test_saved_file_loads_in_tokenizers_and_transformers(kind, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    TOKENIZERS[kind].save(str(path))
    text = "It was line 3 , naïve — isn't it ? \n\n 𝄞"
    ids = TOKENIZERS[kind].encode(text).ids
    fast = PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=END_OF_TEXT)
    assert load_tokenizer(path).encode(text).ids == ids == fast(text).input_ids
    assert fast.decode(ids) == text
    assert fast.eos_token_id == END_OF_TEXT_ID
    assert len(fast) == TOKENIZERS[kind].get_vocab_size()
    assert fast.decode([*ids, END_OF_TEXT_ID], skip_special_tokens=True) == text


def saved(tokenizer, path: Path) -> Path:
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_of_someone_else_reads_special_tokens_in_a_text_as_text(tmp_path: Path):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9)
    ours = existing_tokenizer(saved(tokenizer, tmp_path / "tokenizer.json"))
    text = "no </s> at all"
    assert ours.encode(text, add_special_tokens=False).ids == [byte + 1 for byte in text.encode()]
    assert existing_tokenizer(tmp_path).get_vocab_size() == 258  # the folder will do


def _normalised():
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def _with_a_space_in_front():
    tokenizer = byte_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def _without_an_end():
    return Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))


def _with_a_gap():
    vocab = {**byte_tokenizer().get_vocab(), "gap": 300}
    return Tokenizer(models.BPE(vocab=vocab, merges=[]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_normalised, "does not give a text back"),
        (_with_a_space_in_front, "does not give a text back"),
        (_without_an_end, "has no end of text; allowed: one of <|endoftext|>"),
        (_with_a_gap, "has 258 tokens with ids up to 300; allowed: no gaps"),
    ],
)
def test_a_tokenizer_that_shards_cannot_be_written_with_is_refused(tmp_path: Path, make, message):
    path = saved(make(), tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=re.escape(message)) as raised:
        existing_tokenizer(path)
    assert str(path) in str(raised.value)
