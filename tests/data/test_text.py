import hashlib
import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnres.data import text as text_module
from attnres.data.text import BUNDLED_SHA256, BundledText, TextFiles, document_pieces, read_document
from attnres.data.tokenizer import train_bpe
from attnres.errors import DataError

# One piece of text with many spellings of white space, contractions and letters of several bytes.
FRAGMENTS = st.lists(
    st.sampled_from(["a", "bc", " ", "\n", "\t", "é", "'s", "\r\n", "\u2028", "\x85", "7", "!?", "𝄞"]), max_size=4
)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "PIECE_CHARACTERS", 16)


@pytest.fixture(scope="module")
def tokenizer():
    # Trained on runs of white space, so that a cut inside one would show as other tokens.
    runs = ["\n\n", "\n\n\n", "\r\n\r\n", "\n ", " \n", "\n\t", "\t\n", "\x85\n", "\u2028\n", "  "]
    return train_bpe([f"a{run}bc's é!?{run}7x\ny{run}{run}" for run in runs], 280)


def pieces_of(text: str, size: int, part: int = 7) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "PIECE_CHARACTERS", size)
        parts = [text[start : start + part] for start in range(0, len(text), part)]
        pieces = list(document_pieces(parts, "a text"))
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return [piece.text for piece in pieces]


@settings(deadline=None)
@given(fragments=st.lists(FRAGMENTS, min_size=10, max_size=40))
def test_pieces_encode_to_the_tokens_of_the_whole_text(tokenizer, fragments):
    text = "x\ny".join("".join(fragment) for fragment in fragments)
    pieces = pieces_of(text, size=16)
    assert "".join(pieces) == text
    assert [token for piece in pieces for token in tokenizer.encode(piece).ids] == tokenizer.encode(text).ids


@given(text=st.text(min_size=1, max_size=300).filter(lambda text: bool(text.strip())))
def test_pieces_keep_any_text(text):
    assert "".join(pieces_of(text, size=16)) == text


def test_long_text_is_cut_into_several_pieces():
    assert len(pieces_of("word\n" * 100, size=16)) > 20


def test_text_without_line_ends_is_still_cut():
    assert max(len(piece) for piece in pieces_of("word " * 100, size=16)) <= 4 * 16 + 7


@given(content=st.text(min_size=1, max_size=100).filter(lambda text: bool(text.strip()) and "\0" not in text))
def test_file_content_is_kept_across_reads_that_split_characters(content):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "PIECE_CHARACTERS", 3)
        pieces = list(read_document(io.BytesIO(content.encode()), "file"))
    assert "".join(piece.text for piece in pieces) == content.removeprefix("\ufeff")


@pytest.mark.parametrize(
    ("content", "offset"),
    [
        (b"good text\n" * 5 + b"\xff", 50),
        (b"0123456789abcd\xe2\x82" + b"!" * 9, 14),
        (b"0123456789abcde\xe2\x82", 15),
    ],
    ids=["plain", "character-split-by-a-read", "truncated-character"],
)
@pytest.mark.usefixtures("small_pieces")
def test_error_names_file_and_offset_of_a_byte_that_is_not_utf8(content, offset):
    with pytest.raises(DataError, match=rf"^bad\.txt is not text: byte 0x\w\w at byte {offset} is not UTF-8$"):
        list(read_document(io.BytesIO(content), "bad.txt"))


@pytest.mark.usefixtures("small_pieces")
def test_error_names_file_and_offset_of_a_nul_byte():
    with pytest.raises(DataError, match=r"^bad\.txt is not text: NUL byte at byte 40;"):
        list(read_document(io.BytesIO(b"good text\n" * 4 + b"\0more"), "bad.txt"))


def test_byte_order_mark_is_dropped_only_at_the_start():
    (piece,) = read_document(io.BytesIO("\ufeffone\ufefftwo".encode()), "file")
    assert piece.text == "one\ufefftwo"


def test_line_ends_are_kept_as_they_are():
    (piece,) = read_document(io.BytesIO(b"one\r\ntwo\rthree\n"), "file")
    assert piece.text == "one\r\ntwo\rthree\n"


def test_folder_stands_for_its_text_files_in_order_of_name(tmp_path: Path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [piece.text for piece in TextFiles([tmp_path])] == ["a.txt", "b.txt", "sub/c.txt"]


@pytest.mark.parametrize("split", ["train", "valid"])
def test_bundled_text_is_the_one_its_checksum_names(split):
    text = "".join(piece.text for piece in BundledText(split))
    assert hashlib.sha256(text.encode()).hexdigest() == BUNDLED_SHA256[split]


def test_bundled_validation_novel_is_not_in_the_train_text():
    train = set("".join(piece.text for piece in BundledText("train")).splitlines())
    valid = "".join(piece.text for piece in BundledText("valid")).splitlines()
    assert not [line for line in valid if len(line) > 40 and line in train]
