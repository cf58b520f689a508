"""Tokens to tensors, and the checks that model and data belong together."""

import hashlib
from pathlib import Path
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor, nn

from attnres.data.sampler import check_context
from attnres.data.shards import TokenShard
from attnres.errors import ConfigError
from attnres.train.config import RunConfig


class TokenData(Protocol):
    """What a run reads: `attnres.data.Dataset`, or anything like it."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def tokenizer_path(self) -> Path | None:
        """File of the tokenizer, copied into the run folder."""
        ...

    def split(self, name: str) -> TokenShard:
        """Tokens of ``"train"`` or ``"valid"``."""
        ...


@final
class TokenArrays:
    """Tokens that are already in memory, in place of a dataset folder.

    Args:
        train: Token ids, one-dimensional.
        valid: Token ids, one-dimensional.
        vocab_size: Ids are below this.
        bytes_per_token: Mean UTF-8 bytes of text that a token stands for; bits per byte are computed with it.
    """

    tokenizer_path: Path | None = None

    def __init__(self, train: np.ndarray, valid: np.ndarray, *, vocab_size: int, bytes_per_token: float = 1.0):
        self.vocab_size = vocab_size
        self._shards = {
            name: TokenShard(
                name=name,
                tokens=tokens,  # pyright: ignore[reportArgumentType]  # read like a memory map
                num_bytes=max(1, round(len(tokens) * bytes_per_token)),
                sha256=hashlib.sha256(np.ascontiguousarray(tokens, dtype="<u4").tobytes()).hexdigest(),
            )
            for name, tokens in (("train", train), ("valid", valid))
        }

    def split(self, name: str) -> TokenShard:
        """Tokens of ``"train"`` or ``"valid"``."""
        return self._shards[name]


def check_data(model: nn.Module, data: TokenData, config: RunConfig) -> None:
    """Raise unless model, data and settings belong together.

    Raises:
        ConfigError: The vocabulary of the model is not the data's.
        DataError: The context is longer than a shard.
    """
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    for name, value in (("the model", vocab_size), ("data.vocab_size", config.data.vocab_size)):
        if value is not None and value != data.vocab_size:
            raise ConfigError(f"the vocabulary of {name} is {value}; allowed: {data.vocab_size}, that of the shards")
    for split in ("train", "valid"):
        check_context(len(data.split(split)), config.data.context)


def checksums(data: TokenData) -> dict[str, str]:
    """Checksum of each split, to tell whether two runs read the same tokens."""
    return {name: data.split(name).sha256 for name in ("train", "valid")}


def read_windows(shard: TokenShard, starts: np.ndarray, context: int, device: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets ``[B, T]`` of the windows that begin at ``starts``, on a device."""
    inputs, targets = shard.windows(starts, context)
    return torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device)
