"""Ranks find out whether all mean the same, before any of them begins what the others would wait in."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from attnres.errors import AttnResError, ConfigError

T = TypeVar("T")


class Round(NamedTuple):
    """A comparison within one group."""

    ranks: str
    """What its ranks are called, such as ``"pipeline"``."""
    group: dist.ProcessGroup | None
    """The ranks."""
    beside: str = ""
    """What else has to be the same in this group."""


def settled(rounds: Sequence[Round], make: Callable[[], tuple[T, str]]) -> T:
    """Do on each rank what may fail on one of them alone; go on if it succeeds on all, and all mean the same.

    A rank that learns in one round that something is wrong says so in the next, so that no group goes on without it.

    Args:
        rounds: Groups to compare in, in one order on all ranks.
        make: Gives a result, and in a line what this rank means; it must not communicate.

    Raises:
        AttnResError: What ``make`` raised here.
        ConfigError: It failed on another rank, or ranks differ; one line says which and how.
    """
    result: T | None = None
    error: AttnResError | None = None
    try:
        result, here = make()
    except AttnResError as found:
        error, here = found, str(found)
    for ranks, group, beside in rounds:
        try:
            check_agreement(group, here if error else beside + here, wrong=error is not None, ranks=ranks)
        except ConfigError as found:
            error = error or found
            here = str(error)
    if error is not None:
        raise error
    return result  # pyright: ignore[reportReturnType]


def check_agreement(
    group: dist.ProcessGroup | None, here: str, *, wrong: bool = False, ranks: str = "pipeline"
) -> None:
    """Raise on every rank of a group unless all mean the same.

    Args:
        group: The ranks.
        here: What this rank means.
        wrong: Whether it is wrong in itself, whatever the others mean.
        ranks: What the ranks of the group are called.

    Raises:
        ConfigError: Ranks differ; one line says which and how, the same on every rank.
    """
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (here, wrong), group=group)
    for rank, (text, is_wrong) in enumerate(told):
        if is_wrong:
            raise ConfigError(f"{ranks} rank {rank}: {text}")
    for rank, (text, _) in enumerate(told):
        if text != told[0][0]:
            raise ConfigError(
                f"{ranks} rank {rank} has [{text}], {ranks} rank 0 has [{told[0][0]}]; allowed: the same on all"
            )
