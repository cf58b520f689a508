"""Tokenizers: byte-level BPE trained on the corpus, or plain bytes.

Both are files of the ``tokenizers`` library (Transformers' ``PreTrainedTokenizerFast`` loads them too), need no
download, and are lossless: ``decode(encode(text)) == text`` for every text. The end-of-text token is an entry of the
vocabulary that no text can produce: a text that happens to spell it is encoded as ordinary characters.
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
