import json
import sys
from pathlib import Path

import datasets
import pytest

from attnres.data import END_OF_TEXT, HubText, prepare_hub
from attnres.errors import ConfigError, DataError
from data.texts import TRAIN_TEXT

ROWS = TRAIN_TEXT.splitlines(keepends=True)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A dataset with two splits, made by save_to_disk."""
    train = datasets.Dataset.from_dict({"body": [*ROWS[:100], "", " \n"], "number": list(range(102))})
    test = datasets.Dataset.from_dict({"body": ROWS[100:110], "number": list(range(10))})
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "saved")
    return str(tmp_path / "saved")


def text_of(dataset, split: str) -> str:
    return dataset.tokenizer().decode(dataset.split(split).tokens.tolist())


def test_rows_of_a_saved_dataset_are_documents(saved, tmp_path: Path):
    train, valid = (HubText(path=saved, column="body", split=split) for split in ("train", "test"))
    dataset = prepare_hub(tmp_path / "out", train, valid, vocab_size=300)
    assert text_of(dataset, "train") == "".join(row + END_OF_TEXT for row in ROWS[:100])
    assert text_of(dataset, "valid") == "".join(row + END_OF_TEXT for row in ROWS[100:110])
    assert dataset.split("valid").num_bytes == len("".join(ROWS[100:110]).encode())
    assert dataset.source == (
        "datasets saved, split train, column body; valid: datasets saved, split test, column body"
    )


def test_saved_single_split_needs_no_split(tmp_path: Path):
    datasets.Dataset.from_dict({"text": ROWS[:3]}).save_to_disk(tmp_path / "one")
    assert [piece.text for piece in HubText(path=str(tmp_path / "one"))] == ROWS[:3]


WRITERS = {
    "rows.jsonl": lambda path: path.write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS)),
    "rows.parquet": lambda path: datasets.Dataset.from_dict({"text": ROWS}).to_parquet(path),
}


@pytest.mark.parametrize("name", list(WRITERS))
def test_end_of_a_local_file_is_held_out(tmp_path: Path, name):
    WRITERS[name](tmp_path / name)
    dataset = prepare_hub(tmp_path / "out", HubText(path=str(tmp_path / name)), tokenizer="bytes", valid_fraction=0.1)
    together = text_of(dataset, "train") + text_of(dataset, "valid")
    assert together == "".join(row + END_OF_TEXT for row in ROWS)
    assert 0.1 <= dataset.split("valid").num_bytes / len(TRAIN_TEXT.encode()) < 0.12


def test_long_row_is_read_in_pieces(tmp_path: Path):
    datasets.Dataset.from_dict({"text": [TRAIN_TEXT * 20]}).save_to_disk(tmp_path / "long")
    pieces = list(HubText(path=str(tmp_path / "long")))
    assert "".join(piece.text for piece in pieces) == TRAIN_TEXT * 20
    assert len(pieces) > 2
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def refusal(tmp_path: Path, train: HubText) -> str:
    before = set(tmp_path.iterdir())
    with pytest.raises(DataError) as caught:
        prepare_hub(tmp_path / "out", train, vocab_size=300)
    assert len(str(caught.value).splitlines()) == 1
    assert set(tmp_path.iterdir()) == before
    return str(caught.value)


def test_missing_column_is_refused_with_the_columns_there(saved, tmp_path: Path):
    assert refusal(tmp_path, HubText(path=saved)) == f"{saved} has no column 'text'; it has body, number"


def test_column_of_numbers_is_refused(saved, tmp_path: Path):
    message = refusal(tmp_path, HubText(path=saved, column="number"))
    assert message == f"row 0 of {saved}: column 'number' holds int, not text"


def test_missing_split_is_refused_with_the_splits_there(saved, tmp_path: Path):
    message = refusal(tmp_path, HubText(path=saved, column="body", split="dev"))
    assert message == f"dataset {saved} has no split 'dev'; it has train, test"


def test_name_that_is_neither_local_nor_reachable_is_refused(tmp_path: Path):
    assert refusal(tmp_path, HubText(path="nobody/nothing")).startswith(
        "dataset nobody/nothing (split train) cannot be read: "
    )


def test_file_of_unknown_kind_is_refused(tmp_path: Path):
    (tmp_path / "rows.xml").write_text("<a/>")
    assert "has suffix '.xml'; allowed: .json, " in refusal(tmp_path, HubText(path=str(tmp_path / "rows.xml")))


def test_damaged_file_is_refused(tmp_path: Path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and no more")
    assert "rows.parquet (split train) cannot be read: " in refusal(
        tmp_path, HubText(path=str(tmp_path / "rows.parquet"))
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["", "  \n"], "text is empty: column 'text' of "),
        (["fine", "not\0fine"], "is not text: NUL at character 3"),
        (["fine", None], "column 'text' holds NoneType, not text"),
    ],
    ids=["blank", "nul", "none"],
)
def test_rows_without_proper_text_are_refused(tmp_path: Path, rows, message):
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(tmp_path / "rows")
    assert message in refusal(tmp_path, HubText(path=str(tmp_path / "rows")))


def test_same_rows_for_both_splits_are_refused(saved, tmp_path: Path):
    with pytest.raises(ConfigError, match="they must differ"):
        prepare_hub(tmp_path / "out", HubText(path=saved), HubText(path=saved))


def test_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = refusal(tmp_path, HubText(path="any"))
    assert message == "Hugging Face datasets is not installed; pip install 'attnres[datasets]'"
