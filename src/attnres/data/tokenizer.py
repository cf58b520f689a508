"""Tokenizers: byte-level BPE trained on the corpus, plain bytes, or one that is there already.

All are files of the ``tokenizers`` library, which Transformers' ``PreTrainedTokenizerFast`` loads too. Those made here
need no download and are lossless: ``decode(encode(text)) == text`` for every text. The end-of-text token is an entry of
the vocabulary that no text can produce: a text that happens to spell it is encoded as ordinary characters.
"""

import json
import warnings
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from attnres.errors import ConfigError, DataError

END_OF_TEXT = "<|endoftext|>"
"""Written into the shards behind each document."""

END_OF_TEXT_ID = 0
"""Its token id in every tokenizer of ours."""

BYTE_VOCAB_SIZE = 257
"""256 bytes and the end of text."""

ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
"""What the end of text is called in tokenizers of others; the first that is there is taken."""

MAX_VOCAB_SIZE = 2**32
"""Token ids are stored in at most 32 bits."""


def train_bpe(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Train byte-level BPE; the same texts give the same tokenizer, file for file.

    A text too short to learn that many tokens gives a smaller vocabulary, and a warning.

    Args:
        texts: Pieces of the training text, cut between lines.
        vocab_size: Entries, with the end of text and the 256 bytes.

    Raises:
        ConfigError: ``vocab_size`` leaves no room for a single merge, or its ids do not fit 32 bits.
    """
    check_vocab_size(vocab_size)
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    learned = tokenizer.get_vocab_size()
    if learned < vocab_size:
        warnings.warn(
            f"vocab_size is {vocab_size}, but the text is so short that BPE learned only {learned} tokens", stacklevel=2
        )
    return _without_special_tokens(tokenizer)


def byte_tokenizer() -> Tokenizer:
    """Build the tokenizer without training: byte ``b`` is token ``b + 1``."""
    vocab = {END_OF_TEXT: END_OF_TEXT_ID} | {symbol: byte + 1 for byte, symbol in enumerate(_byte_symbols())}
    return _byte_level(models.BPE(vocab=vocab, merges=[]))


def existing_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer of someone else's and make sure that shards can be written with it.

    It must be lossless, give the same tokens when a text is cut between two lines, and have an end of text. It then
    encodes a text that happens to spell a special token as ordinary characters, and neither cuts nor pads.

    Args:
        path: A ``tokenizer.json``, or a folder with one.

    Raises:
        DataError: There is no such file, it is not a tokenizer, or it lacks one of these properties.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    tokenizer = load_tokenizer(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    end_of_text_id(tokenizer, file)
    ids = tokenizer.get_vocab().values()
    if max(ids) >= len(ids):
        raise DataError(f"tokenizer file {file} has {len(ids)} tokens with ids up to {max(ids)}; allowed: no gaps")
    _check_lossless(tokenizer, file)
    return tokenizer


def end_of_text_id(tokenizer: Tokenizer, file: Path | None = None) -> int:
    """Id of the end of text.

    Raises:
        DataError: The tokenizer has none of the names that are known for it.
    """
    ids = [tokenizer.token_to_id(name) for name in ENDS_OF_TEXT]
    known = [index for index in ids if index is not None]
    if not known:
        raise DataError(f"tokenizer file {file} has no end of text; allowed: one of {', '.join(ENDS_OF_TEXT)}")
    return known[0]


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a ``tokenizer.json``.

    Raises:
        DataError: There is no such file, or it is not a tokenizer.
    """
    if not path.is_file():
        raise DataError(f"tokenizer file {path} is missing")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise DataError(f"tokenizer file {path} cannot be read: {error}") from error


def check_vocab_size(vocab_size: int) -> None:
    """Raise ConfigError unless BPE can have this many tokens."""
    if not BYTE_VOCAB_SIZE < vocab_size <= MAX_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size is {vocab_size}; allowed: {BYTE_VOCAB_SIZE + 1} (256 bytes, end of text, one merge) "
            f"to {MAX_VOCAB_SIZE} (32-bit ids)"
        )


def _check_lossless(tokenizer: Tokenizer, file: Path) -> None:
    lines = ("One line, of 1,234 words.\n", "  Another:\tÉté, 字\n\n", "and the <last>.")
    first, *_, last = lines

    def encoded(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    whole = "".join(lines)
    if tokenizer.decode(encoded(whole)) != whole or encoded(first) + encoded(last) != encoded(first + last):
        raise DataError(
            f"tokenizer file {file} does not give a text back, or gives other tokens when it is cut between lines; "
            "allowed: byte-level tokenizers"
        )


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _without_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Leave the end of text in the vocabulary, but stop the library from finding it in texts."""
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(description, ensure_ascii=False))


def _byte_symbols() -> list[str]:
    """The character by which byte-level BPE names each byte: itself if visible in Latin-1, else one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]
