"""The memory of the sources as plain numbers: what a rank holds while it runs, from depth, tokens, width and layout.

These functions are what the paper's example of a long prompt is computed with (section 4.2: 15 GB, then 1.9 GB on each
of eight ranks, then below 0.3 GB in chunks), and they say to the byte what a listener measures on a run. Nothing here
knows of processes, so a planner can ask for layouts that do not exist yet.

What counts is the memory of the sources themselves: the finished blocks, the embedding, and the partial sum, each of
them ``[batch, tokens, dim]`` in the dtype of the stream. The paper counts the finished blocks alone. A run holds the
embedding as well, and either the partial sum or the last block, so at its fullest one tensor more than it has blocks.
Not counted are results of phase 1, and a partial sum that is being replaced while the new one is made.
"""

from dataclasses import dataclass

from attnres.errors import ConfigError
from attnres.residual import Strategy
from attnres.residual.history import HistoryStrategy


@dataclass(frozen=True, kw_only=True)
class HeldSources:
    """How many source tensors a state holds at a site."""

    blocks: int
    """Finished blocks; with Full AttnRes, outputs of sublayers."""
    partial: bool
    """Whether there is a partial sum: not at a block's first site."""
    embedding: bool = True
    """Whether the token embedding is held as a source of its own."""

    @property
    def tensors(self) -> int:
        """All of them together."""
        return self.blocks + self.partial + self.embedding


def held_sources(strategy: Strategy, num_sublayers: int, site: int) -> HeldSources:
    """What a state holds when a site is read.

    Args:
        strategy: One that keeps sources, such as `BlockAttnRes`.
        num_sublayers: Attention and MLP sublayers of the model.
        site: From 0; ``num_sublayers`` is the output read.

    Raises:
        ConfigError: The strategy keeps no sources, or there is no such site.

    Examples:
        >>> from attnres.residual import BlockAttnRes
        >>> held_sources(BlockAttnRes(sublayers_per_block=2), 6, 3)
        HeldSources(blocks=1, partial=True, embedding=True)
    """
    if not isinstance(strategy, HistoryStrategy):
        raise ConfigError(f"{strategy.label} keeps no sources; allowed are strategies such as Full and Block AttnRes")
    if not 0 <= site <= num_sublayers:
        raise ConfigError(f"site is {site}; allowed is 0 to {num_sublayers}")
    ends = strategy.block_ends(num_sublayers)
    return HeldSources(blocks=sum(end <= site for end in ends), partial=site > 0 and site not in ends)


def own_tokens(tokens: int, *, tensor_ranks: int, rank: int) -> range:
    """Which of the tokens of one forward a tensor rank holds the sources of.

    Runs of equal length, the last ones shorter or empty where the number does not divide, as `torch.chunk` cuts.

    Args:
        tokens: Tokens of the forward, of one sequence.
        tensor_ranks: Ranks that share them.
        rank: Among these.

    Raises:
        ConfigError: A number is out of range.

    Examples:
        >>> [own_tokens(5, tensor_ranks=4, rank=rank) for rank in range(4)]
        [range(0, 2), range(2, 4), range(4, 5), range(5, 5)]
    """
    _check(least=0, tokens=tokens)
    _check(tensor_ranks=tensor_ranks)
    if not 0 <= rank < tensor_ranks:
        raise ConfigError(f"rank is {rank}; allowed is 0 to {tensor_ranks - 1}")
    length = -(-tokens // tensor_ranks)
    return range(min(rank * length, tokens), min((rank + 1) * length, tokens))


def bank_bytes(
    *,
    blocks: int,
    tokens: int,
    dim: int,
    element_bytes: int,
    tensor_ranks: int = 1,
    chunk: int | None = None,
    batch: int = 1,
    rank: int = 0,
    embedding: bool = False,
    partial: bool = False,
) -> int:
    """Bytes of the sources that a rank holds: ``tensors * batch * own tokens * dim * element_bytes``.

    Args:
        blocks: Finished blocks that are held.
        tokens: Tokens of a sequence.
        dim: Model width.
        element_bytes: Bytes of a number; 2 for bfloat16.
        tensor_ranks: Ranks among which the tokens are divided.
        chunk: Tokens of one forward, where a sequence is taken in chunks: the sources of the chunks before are needed
            by none that follow. None: all tokens in one forward.
        batch: Sequences of a forward.
        rank: Of the tensor ranks, where their numbers of tokens differ; rank 0 has the most.
        embedding: Count the embedding as well.
        partial: Count the partial sum as well.

    Returns:
        The bytes during the largest forward.

    Raises:
        ConfigError: A number is out of range.

    Examples:
        The paper's: a prompt of 128K tokens, on eight ranks, in chunks of 16K.

        >>> prompt = {"blocks": 8, "tokens": 2**17, "dim": 7168, "element_bytes": 2}
        >>> bank_bytes(**prompt), bank_bytes(**prompt, tensor_ranks=8)
        (15032385536, 1879048192)
        >>> bank_bytes(**prompt, tensor_ranks=8, chunk=2**14)
        234881024
    """
    _check(least=0, blocks=blocks)
    _check(dim=dim, element_bytes=element_bytes, batch=batch, chunk=1 if chunk is None else chunk)
    largest = tokens if chunk is None else min(chunk, tokens)
    own = len(own_tokens(largest, tensor_ranks=tensor_ranks, rank=rank))
    return (blocks + embedding + partial) * batch * own * dim * element_bytes


def _check(*, least: int = 1, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise ConfigError(f"{name} is {number}; allowed is {least} or more")
