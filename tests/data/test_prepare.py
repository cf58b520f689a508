import errno
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from attnres.data import END_OF_TEXT, Dataset, byte_tokenizer, default_dataset, folders, open_dataset, prepare
from attnres.data.text import BUNDLED_SHA256
from attnres.errors import ConfigError, DataError
from data.texts import TRAIN_TEXT, VALID_TEXT


def listing(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def text_of(dataset: Dataset, split: str) -> str:
    return dataset.tokenizer().decode(dataset.split(split).tokens.tolist())


def module():
    """The module, whose name in the package is that of its main function."""
    import importlib

    return importlib.import_module("attnres.data.prepare")


def test_several_files_are_documents_in_the_order_given(tmp_path: Path, texts):
    folder = tmp_path / "books"
    folder.mkdir()
    for name in "ba":
        (folder / f"{name}.txt").write_text(f"book {name}\n" * 3)
    dataset = prepare(tmp_path / "out", train=[texts[0], folder], valid=[texts[1]], tokenizer="bytes")
    assert text_of(dataset, "train") == END_OF_TEXT.join([TRAIN_TEXT, "book a\n" * 3, "book b\n" * 3, ""])
    assert text_of(dataset, "valid") == VALID_TEXT + END_OF_TEXT
    assert (dataset.tokenizer_name, dataset.vocab_size) == ("bytes", 257)


@pytest.mark.parametrize("fraction", [0.02, 0.3])
def test_end_of_the_train_text_is_held_out_without_a_valid_text(tmp_path: Path, texts, fraction):
    dataset = prepare(tmp_path / "out", train=[texts[0]], vocab_size=300, valid_fraction=fraction)
    train, valid = text_of(dataset, "train"), text_of(dataset, "valid")
    assert train + valid == TRAIN_TEXT + END_OF_TEXT
    assert valid.startswith("It was line ")
    assert fraction <= len(valid) / len(TRAIN_TEXT) < fraction + 0.01


def test_tokenizer_learns_from_the_train_split_alone(tmp_path: Path, texts):
    one = prepare(tmp_path / "one", train=[texts[0]], valid=[texts[1]], vocab_size=300)
    texts[1].write_text("zyzzyva " * 500)
    two = prepare(tmp_path / "two", train=[texts[0]], valid=[texts[1]], vocab_size=300)
    assert one.tokenizer_path.read_bytes() == two.tokenizer_path.read_bytes()


def test_preparing_twice_gives_the_same_bytes(tmp_path: Path, texts):
    for name in ("one", "two"):
        prepare(tmp_path / name, train=[texts[0]], vocab_size=300)
    assert listing(tmp_path / "one") == listing(tmp_path / "two")


def test_folder_has_the_permissions_of_any_new_folder(dataset: Dataset, tmp_path: Path):
    (tmp_path / "plain").mkdir()
    assert dataset.folder.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_bundled_corpus_is_prepared_once_and_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ATTNRES_CACHE", str(tmp_path / "cache"))
    first = default_dataset()
    monkeypatch.setattr(module(), "_write", None)
    again = default_dataset(tmp_path / "cache")
    assert first.folder == again.folder
    assert first.folder.parent == tmp_path / "cache"
    assert (first.vocab_size, first.tokenizer_name) == (4096, "bpe-4096")
    for split in ("train", "valid"):
        text = text_of(first, split).removesuffix(END_OF_TEXT)
        assert hashlib.sha256(text.encode()).hexdigest() == BUNDLED_SHA256[split]
        assert first.bytes_per_token(split) > 3.5


def test_cache_is_below_home_without_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ATTNRES_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert module()._cache_folder(None) == tmp_path / ".cache" / "attnres"


@pytest.fixture
def small_bundle(monkeypatch: pytest.MonkeyPatch, texts) -> None:
    """Stand-in for the bundled corpus, so that preparing it takes no time."""
    files = dict(zip(("train", "valid"), texts, strict=True))
    monkeypatch.setattr(module(), "BundledText", lambda split: module().TextFiles([files[split]]))


@pytest.mark.usefixtures("small_bundle")
def test_slower_of_two_processes_uses_what_the_faster_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fill, faster = module()._fill, []

    def overtaken(*args):
        monkeypatch.setattr(module(), "_fill", fill)
        faster.append(default_dataset(tmp_path / "cache", vocab_size=300))
        fill(*args)

    monkeypatch.setattr(module(), "_fill", overtaken)
    slower = default_dataset(tmp_path / "cache", vocab_size=300)
    assert slower.folder == faster[0].folder
    np.testing.assert_array_equal(slower.split("train").tokens, faster[0].split("train").tokens)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [slower.folder.name]


@pytest.mark.usefixtures("small_bundle")
def test_damaged_cache_is_refused_by_name(tmp_path: Path):
    dataset = default_dataset(tmp_path, vocab_size=300)
    (dataset.folder / "train.bin").write_bytes(b"")
    with pytest.raises(DataError, match=rf"^cached dataset is damaged; delete {dataset.folder} and try again: shard "):
        default_dataset(tmp_path, vocab_size=300)


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-renames"])
def test_overwrite_replaces_a_dataset_and_leaves_nothing_else(dataset: Dataset, texts, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    before = set(dataset.folder.parent.iterdir())
    replaced = prepare(dataset.folder, train=[texts[0]], valid=[texts[1]], tokenizer="bytes", overwrite=True)
    assert text_of(replaced, "train") == TRAIN_TEXT + END_OF_TEXT
    assert open_dataset(dataset.folder).vocab_size == 257
    assert set(dataset.folder.parent.iterdir()) == before


@pytest.mark.parametrize("there", ["nothing", "empty-folder"])
def test_overwrite_needs_no_dataset_to_replace(tmp_path: Path, texts, there):
    if there == "empty-folder":
        (tmp_path / "out").mkdir()
    assert prepare(tmp_path / "out", train=[texts[0]], vocab_size=300, overwrite=True).vocab_size == 300


def test_overwrite_through_a_link_replaces_the_folder_and_keeps_the_link(dataset: Dataset, texts, tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to(dataset.folder)
    prepare(link, train=[texts[0]], tokenizer="bytes", overwrite=True)
    assert link.is_symlink()
    assert open_dataset(dataset.folder).vocab_size == 257


@pytest.mark.parametrize("step", ["write_shard", "write_record"])
def test_full_disk_leaves_the_old_dataset_and_nothing_new(dataset: Dataset, texts, monkeypatch, step):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = listing(dataset.folder.parent)
    monkeypatch.setattr(module(), step, full)
    with pytest.raises(DataError, match=r"cannot be written: No space left on device$"):
        prepare(dataset.folder, train=[texts[0]], vocab_size=300, overwrite=True)
    assert listing(dataset.folder.parent) == before


def test_folder_made_meanwhile_by_another_process_is_not_replaced(tmp_path: Path, texts, monkeypatch):
    fill = module()._fill

    def overtaken(*args):
        fill(*args)
        (tmp_path / "out").mkdir()

    monkeypatch.setattr(module(), "_fill", overtaken)
    with pytest.raises(DataError, match="exists"):
        prepare(tmp_path / "out", train=[texts[0]], vocab_size=300)
    assert list((tmp_path / "out").iterdir()) == []
    assert not list(tmp_path.glob(".*"))


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def dataset_with_notes(folder: Path) -> Path:
    write(folder / "dataset.json", b"{}")
    return write(folder / "notes.txt", b"mine").parent


BAD_INPUTS = {
    "missing-file": (DataError, r"missing\.txt does not exist", lambda d: {"train": [d / "missing.txt"]}),
    "missing-valid": (DataError, r"missing\.txt does not exist", lambda d: {"valid": [d / "missing.txt"]}),
    "empty-text": (DataError, r"text is empty: .*e\.txt", lambda d: {"train": [write(d / "e.txt", b"")]}),
    "blank-text": (DataError, r"text is empty: .*e\.txt", lambda d: {"train": [write(d / "e.txt", b" \n\n")]}),
    "empty-valid": (DataError, r"text is empty: .*e\.txt", lambda d: {"valid": [write(d / "e.txt", b"")]}),
    "nul-bytes": (
        DataError,
        r"x\.txt is not text: NUL byte at byte 3;",
        lambda d: {"train": [write(d / "x.txt", b"abc\0def")]},
    ),
    "not-utf8": (
        DataError,
        r"x\.txt is not text: byte 0xe9 at byte 1 is not UTF-8",
        lambda d: {"valid": [write(d / "x.txt", "né!".encode("latin-1"))]},
    ),
    "folder-without-text": (
        DataError,
        r"empty holds no \.txt file",
        lambda d: {"train": [write(d / "empty/a.md", b"a").parent]},
    ),
    "no-files": (ConfigError, "no text files given", lambda d: {"train": []}),
    "same-file-twice": (
        ConfigError,
        r"train\.txt is given twice",
        lambda d: {"train": [d / "train.txt", d / "train.txt"]},
    ),
    "train-is-valid": (
        ConfigError,
        r"train\.txt is given as train and as valid",
        lambda d: {"valid": [d / "train.txt"]},
    ),
    "too-short-to-hold-out": (
        DataError,
        "text has 1 characters, too few to hold out valid_fraction=0.02",
        lambda d: {"train": [write(d / "s.txt", b"a")], "valid": None, "valid_fraction": 0.02},
    ),
    "fraction-of-one": (
        ConfigError,
        "valid_fraction is 1.0; allowed: above 0 and below 1",
        lambda d: {"valid": None, "valid_fraction": 1.0},
    ),
    "vocabulary-too-small": (ConfigError, "vocab_size is 257; allowed: 258 ", lambda d: {"vocab_size": 257}),
    "vocabulary-too-large": (
        ConfigError,
        "vocab_size is 4294967297; .* to 4294967296",
        lambda d: {"vocab_size": 2**32 + 1},
    ),
    "unknown-tokenizer": (
        ConfigError,
        "tokenizer is 'words'; allowed: 'bpe', 'bytes'",
        lambda d: {"tokenizer": "words"},
    ),
    "output-exists": (DataError, "output folder .*there exists", lambda d: {"out": write(d / "there/a", b"a").parent}),
    "output-is-a-file": (DataError, "output folder .*file exists", lambda d: {"out": write(d / "file", b"a")}),
    "output-below-a-file": (
        DataError,
        "not a folder",
        lambda d: {"out": write(d / "file", b"a") / "out"},
    ),
    "overwrite-of-a-file": (
        DataError,
        "file is not a dataset folder",
        lambda d: {"out": write(d / "file", b"a"), "overwrite": True},
    ),
    "overwrite-of-other-files": (
        DataError,
        r"there is not a dataset folder \(it is or holds a\); overwrite replaces nothing else",
        lambda d: {"out": write(d / "there/a", b"a").parent, "overwrite": True},
    ),
    "overwrite-of-a-folder-without-record": (
        DataError,
        r"there is not a dataset folder \(it lacks dataset\.json\)",
        lambda d: {"out": write(d / "there/train.bin", b"a").parent, "overwrite": True},
    ),
    "overwrite-of-a-dataset-with-notes": (
        DataError,
        r"holds notes\.txt\); overwrite replaces nothing else",
        lambda d: {"out": dataset_with_notes(d / "there"), "overwrite": True},
    ),
}


@pytest.mark.parametrize(("error", "message", "arguments"), BAD_INPUTS.values(), ids=BAD_INPUTS.keys())
def test_bad_input_is_refused_in_one_line_and_writes_nothing(tmp_path: Path, texts, error, message, arguments):
    given = {
        "out": tmp_path / "out",
        "train": [texts[0]],
        "valid": [texts[1]],
        "vocab_size": 300,
        **arguments(tmp_path),
    }
    before = listing(tmp_path)
    with pytest.raises(error, match=message) as caught:
        prepare(**given)
    assert len(str(caught.value).splitlines()) == 1
    assert listing(tmp_path) == before


def test_record_does_not_hold_paths_of_the_machine(dataset: Dataset):
    assert str(dataset.folder.parent) not in json.dumps(json.loads((dataset.folder / "dataset.json").read_text()))


def test_a_given_tokenizer_writes_the_shards_with_its_own_ids_and_end_of_text(tmp_path: Path, texts):
    tokenizer = byte_tokenizer()
    description = json.loads(tokenizer.to_str())
    vocab = description["model"]["vocab"]
    del vocab[END_OF_TEXT]
    shifted = {symbol: index - 1 for symbol, index in vocab.items()} | {f"unused {n}": 256 + n for n in range(70_000)}
    description["model"]["vocab"] = shifted | {"</s>": len(shifted)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    made = prepare(tmp_path / "out", train=[texts[0]], valid=[texts[1]], tokenizer_file=tmp_path / "tokenizer.json")
    assert made.vocab_size == len(shifted) + 1
    assert made.tokenizer_name == f"given-{made.vocab_size}"
    ids = made.split("valid").tokens
    assert ids.dtype.itemsize == 4  # more ids than 16 bits hold
    assert ids.tolist() == [*texts[1].read_bytes(), len(shifted)]
    assert made.tokenizer().decode(ids[:-1].tolist()) == texts[1].read_text(encoding="utf-8")


def test_a_missing_tokenizer_is_refused_and_writes_nothing(tmp_path: Path, texts):
    with pytest.raises(DataError, match=r"tokenizer file .*none is missing"):
        prepare(tmp_path / "out", train=[texts[0]], valid=[texts[1]], tokenizer_file=tmp_path / "none")
    assert not (tmp_path / "out").exists()
