from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnres.data.holdout import hold_out
from attnres.data.text import Piece


class Pieces:
    """A source of given pieces."""

    description = "pieces"

    def __init__(self, *pieces: Piece) -> None:
        self.pieces = pieces

    def __iter__(self):
        return iter(self.pieces)


LINES = "".join(f"line {n:03}\n" for n in range(100))


@settings(deadline=None)
@given(
    documents=st.lists(st.text("ab\n", min_size=1, max_size=30), min_size=1, max_size=8),
    fraction=st.floats(0.05, 0.95),
)
def test_two_sides_are_the_text_without_gap_or_overlap(documents, fraction):
    source = Pieces(Piece("stay\n" * 9, False), *(Piece(text, True) for text in documents), Piece("end\n" * 9, True))
    train, valid = hold_out(source, fraction)
    assert "".join(p.text for p in train) + "".join(p.text for p in valid) == "".join(p.text for p in source)
    assert sum(p.ends_document for p in (*train, *valid)) == len(documents) + 1
    assert sum(len(p.text) for p in train) == train.characters


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.5])
def test_cut_is_at_a_line_end_near_the_fraction(fraction):
    _, valid = hold_out(Pieces(Piece(LINES, True)), fraction)
    held_out = "".join(piece.text for piece in valid)
    assert held_out.startswith("line ")
    assert fraction * len(LINES) <= len(held_out) <= fraction * len(LINES) + len("line 000\n")


def test_far_line_end_does_not_make_validation_huge():
    _, valid = hold_out(Pieces(Piece("title\n" + "word " * 1000, True)), 0.1)
    assert valid.characters <= 0.2 * 5006


def test_text_can_be_iterated_again():
    train, _ = hold_out(Pieces(Piece(LINES, True)), 0.1)
    assert list(train) == list(train) != []


def test_description_is_that_of_the_whole(tmp_path: Path):
    train, valid = hold_out(Pieces(Piece(LINES, True)), 0.1)
    assert train.description == valid.description == "pieces"
