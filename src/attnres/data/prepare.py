"""From text to a dataset folder: check the text, train a tokenizer, write the shards, publish the folder.

Text and settings are checked in full before the first file is made, and the folder appears under its name only when it
is complete. Whatever goes wrong, nothing is left behind and nothing that was there is lost.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from attnres.data.dataset import (
    DATASET_FILES,
    FORMAT,
    RECORD_FILE,
    TOKENIZER_FILE,
    Dataset,
    DatasetRecord,
    open_dataset,
    write_record,
)
from attnres.data.folders import publish_folder, write_synced
from attnres.data.holdout import TextRange, hold_out, whole
from attnres.data.hub import HubText
from attnres.data.progress import stage
from attnres.data.shards import ShardRecord, dtype_for, file_sha256, write_shard
from attnres.data.text import BUNDLED_SHA256, BundledText, Piece, TextFiles, TextSource
from attnres.data.tokenizer import byte_tokenizer, check_vocab_size, existing_tokenizer, train_bpe
from attnres.errors import ConfigError, DataError

TokenizerKind = Literal["bpe", "bytes"]


@dataclass(frozen=True, kw_only=True)
class TokenizerChoice:
    """Which tokenizer a dataset gets."""

    kind: TokenizerKind = "bpe"
    """``"bpe"`` is trained on the train split; ``"bytes"`` has 257 tokens and needs no training."""
    vocab_size: int = 4096
    """Entries of the BPE vocabulary; not used for bytes."""
    file: Path | None = None
    """A tokenizer that is there already, a ``tokenizer.json`` or a folder with one; then the rest has no effect."""

    def __post_init__(self) -> None:
        if self.file is not None:
            return
        if self.kind not in ("bpe", "bytes"):
            raise ConfigError(f"tokenizer is {self.kind!r}; allowed: 'bpe', 'bytes'")
        if self.kind == "bpe":
            check_vocab_size(self.vocab_size)

    @property
    def needs_training(self) -> bool:
        """Whether it is made from the text."""
        return self.file is None and self.kind == "bpe"

    def name(self, vocab_size: int) -> str:
        """What the record calls the tokenizer."""
        if self.file is not None:
            return f"given-{vocab_size}"
        return "bytes" if self.kind == "bytes" else f"bpe-{vocab_size}"

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """Train it on the texts, or make it without them, or load it."""
        if self.file is not None:
            return existing_tokenizer(self.file)
        return train_bpe(texts, self.vocab_size) if self.kind == "bpe" else byte_tokenizer()


def prepare(
    out: Path | str,
    *,
    train: Sequence[Path] | None = None,
    valid: Sequence[Path] | None = None,
    vocab_size: int = 4096,
    tokenizer: TokenizerKind = "bpe",
    tokenizer_file: Path | None = None,
    valid_fraction: float = 0.02,
    overwrite: bool = False,
) -> Dataset:
    """Make a dataset folder from text files, or from the bundled corpus.

    Every file is one document, followed by an end-of-text token.

    Args:
        out: The folder to make.
        train: Text files, or folders of ``.txt`` files; ``None`` means the bundled corpus (Jane Austen, 3.5 MB).
        valid: The same for validation; ``None`` means a bundled novel that is not in the bundled train text, or for
            files of your own the end of the train text.
        vocab_size: Entries of the BPE vocabulary; not used with ``tokenizer="bytes"``.
        tokenizer: ``"bpe"``, trained on the train split alone, or ``"bytes"``.
        tokenizer_file: A ``tokenizer.json`` (or a folder with one) to use instead, such as that of a trained model.
        valid_fraction: Part of the text that is held out where ``valid`` is ``None`` and ``train`` is not.
        overwrite: Replace a dataset folder that is already at ``out``; nothing else is ever replaced.

    Raises:
        ConfigError: A setting is out of range, or a file is both train and valid text.
        DataError: A text is missing, empty or binary, or ``out`` exists.
    """
    choice = TokenizerChoice(kind=tokenizer, vocab_size=vocab_size, file=tokenizer_file)
    train_source = BundledText("train") if train is None else TextFiles(train)
    valid_source = TextFiles(valid) if valid is not None else BundledText("valid") if train is None else None
    if isinstance(train_source, TextFiles) and isinstance(valid_source, TextFiles):
        _check_disjoint(train_source, valid_source)
    return prepare_source(
        out, train_source, valid_source, choice=choice, valid_fraction=valid_fraction, overwrite=overwrite
    )


def prepare_hub(
    out: Path | str,
    train: HubText,
    valid: HubText | None = None,
    *,
    vocab_size: int = 4096,
    tokenizer: TokenizerKind = "bpe",
    tokenizer_file: Path | None = None,
    valid_fraction: float = 0.02,
    overwrite: bool = False,
) -> Dataset:
    """Make a dataset folder from Hugging Face ``datasets`` (extra ``attnres[datasets]``); every row is one document.

    Args:
        out: The folder to make.
        train: Which rows and which column.
        valid: The same for validation; ``None`` holds out the end of the train text.
        vocab_size: As for ``prepare``, like the rest.
        tokenizer: See ``prepare``.
        tokenizer_file: See ``prepare``.
        valid_fraction: See ``prepare``.
        overwrite: See ``prepare``.

    Raises:
        ConfigError: A setting is out of range, or train and valid are the same rows.
        DataError: The extra is not installed, the dataset, split or column does not exist, or ``out`` exists.
    """
    choice = TokenizerChoice(kind=tokenizer, vocab_size=vocab_size, file=tokenizer_file)
    if valid == train:
        raise ConfigError(f"train and valid are both {train.description}; they must differ")
    return prepare_source(out, train, valid, choice=choice, valid_fraction=valid_fraction, overwrite=overwrite)


def default_dataset(
    cache_dir: Path | str | None = None, *, vocab_size: int = 4096, tokenizer: TokenizerKind = "bpe"
) -> Dataset:
    """Open the bundled corpus as a dataset, prepared on the first call and kept in a cache folder.

    Processes may call this at the same time: the first to finish publishes, the others use what it made.

    Args:
        cache_dir: Where to keep it; ``None`` means ``$ATTNRES_CACHE``, else ``~/.cache/attnres``.
        vocab_size: As for ``prepare``.
        tokenizer: As for ``prepare``.

    Raises:
        ConfigError: A setting is out of range.
        DataError: The cached folder is damaged; the message says which folder to delete.
    """
    choice = TokenizerChoice(kind=tokenizer, vocab_size=vocab_size)
    folder = _cache_folder(cache_dir) / _bundled_name(choice)
    if not folder.exists():
        # Another process may publish the same dataset first; then that one is as good.
        with suppress(FileExistsError):
            _write(folder, whole(BundledText("train")), whole(BundledText("valid")), choice, replace=False)
    try:
        return open_dataset(folder)
    except DataError as error:
        raise DataError(f"cached dataset is damaged; delete {folder} and try again: {error}") from error


def prepare_source(
    out: Path | str,
    train: TextSource,
    valid: TextSource | None,
    *,
    choice: TokenizerChoice,
    valid_fraction: float,
    overwrite: bool,
) -> Dataset:
    """Make a dataset folder from any source of text; what ``prepare`` and ``prepare_hub`` have in common."""
    folder = Path(out).resolve()
    _check_target(folder, overwrite=overwrite)
    ranges = hold_out(train, valid_fraction) if valid is None else (whole(train), whole(valid))
    try:
        _write(folder, *ranges, choice, replace=overwrite)
    except FileExistsError as error:
        raise DataError(_exists(folder)) from error
    return open_dataset(out)


def _write(folder: Path, train: TextRange, valid: TextRange, choice: TokenizerChoice, *, replace: bool) -> None:
    if choice.needs_training:
        with stage("Learning the tokenizer", train.characters) as advance:
            tokenizer = choice.build(piece.text for piece in _counted(train, advance))
    else:
        tokenizer = choice.build(())
    try:
        with publish_folder(folder, replace=replace) as partial:
            _fill(partial, train, valid, choice, tokenizer)
    except FileExistsError:
        raise
    except OSError as error:
        raise DataError(f"dataset folder {folder} cannot be written: {error.strerror or error}") from error


def _fill(folder: Path, train: TextRange, valid: TextRange, choice: TokenizerChoice, tokenizer: Tokenizer) -> None:
    vocab_size = tokenizer.get_vocab_size()
    dtype = dtype_for(vocab_size)
    write_synced(folder / TOKENIZER_FILE, tokenizer.to_str())
    splits: dict[str, ShardRecord] = {}
    for name, text in (("train", train), ("valid", valid)):
        with stage(f"Encoding {name}", text.characters) as advance:
            splits[name] = write_shard(folder / f"{name}.bin", _counted(text, advance), tokenizer, dtype)
    record = DatasetRecord(
        tokenizer=choice.name(vocab_size),
        tokenizer_sha256=file_sha256(folder / TOKENIZER_FILE),
        vocab_size=vocab_size,
        dtype=dtype,
        splits=splits,
        source=_source_line(train, valid),
    )
    write_record(folder, record)


def _source_line(train: TextRange, valid: TextRange) -> str:
    held_out = train.source is valid.source
    return train.description + ("; valid: its end" if held_out else f"; valid: {valid.description}")


def _counted(pieces: Iterable[Piece], advance: Callable[[int], None]) -> Iterator[Piece]:
    for piece in pieces:
        yield piece
        advance(len(piece.text))


def _check_target(folder: Path, *, overwrite: bool) -> None:
    if not os.path.lexists(folder):
        return
    if not overwrite:
        raise DataError(_exists(folder))
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else {"a file"}
    foreign = sorted(names - DATASET_FILES)
    if foreign or (names and RECORD_FILE not in names):
        what = f"it is or holds {foreign[0]}" if foreign else f"it lacks {RECORD_FILE}"
        raise DataError(f"{folder} is not a dataset folder ({what}); overwrite replaces nothing else")


def _exists(folder: Path) -> str:
    return f"output folder {folder} exists; choose another, or allow a dataset to be replaced with overwrite"


def _check_disjoint(train: TextFiles, valid: TextFiles) -> None:
    shared = {file.resolve() for file in train.files} & {file.resolve() for file in valid.files}
    if shared:
        raise ConfigError(f"text file {min(shared)} is given as train and as valid text; they must differ")


def _cache_folder(cache_dir: Path | str | None) -> Path:
    chosen = cache_dir or os.environ.get("ATTNRES_CACHE") or Path.home() / ".cache" / "attnres"
    return Path(chosen).expanduser().resolve()


def _bundled_name(choice: TokenizerChoice) -> str:
    """Folder name of a prepared bundled corpus; another text or format has another name."""
    kind = "bytes" if choice.kind == "bytes" else f"bpe-{choice.vocab_size}"
    return f"bundled-{BUNDLED_SHA256['train'][:8]}-{kind}-format{FORMAT}"
