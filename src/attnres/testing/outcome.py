"""What a check finds and what is made of it: findings, and one outcome per check."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from attnres.testing.adapter import NotApplicable

Status = Literal["pass", "fail", "n/a"]
Seen = float | str


@final
@dataclass(frozen=True, kw_only=True)
class Finding:
    """One comparison within a check."""

    where: str
    """The case, in words."""
    seen: Seen
    """What the implementation gave: a number, or words."""
    expected: Seen
    """What is right; beside an error, the most that is allowed."""
    holds: bool
    """Whether the two agree."""
    is_skipped: bool = False
    """Whether the case does not exist in this implementation; ``where`` then says why."""

    @property
    def closeness(self) -> float:
        """How much of what is allowed is used up, to pick the number worth showing."""
        if isinstance(self.seen, str) or isinstance(self.expected, str) or not self.expected:
            return 0.0
        return abs(self.seen / self.expected)


@final
@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The verdict of one check on one implementation."""

    check: str
    status: Status
    where: str = ""
    """Case of the number shown, or why the check does not apply."""
    seen: Seen = ""
    expected: Seen = ""
    comparisons: int = 0
    """How many comparisons were made, up to the one that failed."""


def settle(check: str, findings: Iterable[Finding]) -> Outcome:
    """One outcome from all findings: the first that does not hold, else the one nearest to its limit.

    An error that the implementation raises, `SystemExit` included, is a failure; `NotApplicable` is an answer.
    """
    kept: list[Finding] = []
    reason = "no case"
    try:
        for finding in findings:
            if finding.is_skipped:
                reason = finding.where
                continue
            if not finding.holds:
                return _outcome(check, "fail", finding, len(kept) + 1)
            kept.append(finding)
    except NotApplicable as answer:
        return Outcome(check=check, status="n/a", where=str(answer))
    except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever the implementation raises is its answer)
        message = " ".join(f"{type(error).__name__}: {error}".split())
        message = "".join(letter if letter.isprintable() else "?" for letter in message)
        return Outcome(check=check, status="fail", where="an error is raised", seen=message[:160], expected="a result")
    if not kept:
        return Outcome(check=check, status="n/a", where=reason)
    worst = max(reversed(kept), key=lambda finding: finding.closeness)
    return _outcome(check, "pass", worst, len(kept))


def _outcome(check: str, status: Status, finding: Finding, comparisons: int) -> Outcome:
    return Outcome(
        check=check,
        status=status,
        where=finding.where,
        seen=finding.seen,
        expected=finding.expected,
        comparisons=comparisons,
    )


def skipped(reason: NotApplicable) -> Finding:
    """A case that does not exist in this implementation; others of the same check may."""
    return Finding(where=str(reason), seen="", expected="", holds=True, is_skipped=True)


def equals(where: str, seen: Seen, expected: Seen) -> Finding:
    """Two things that have to be the same."""
    return Finding(where=where, seen=seen, expected=expected, holds=seen == expected)


def number(where: str, seen: float, expected: float, allowed: float) -> Finding:
    """A number with a right value; ``allowed`` is relative to it, or absolute where it is below one."""
    holds = abs(seen - expected) <= allowed * max(1.0, abs(expected))
    return Finding(where=where, seen=seen, expected=expected, holds=holds)


def error(where: str, found: Tensor | None, exact: Tensor, allowed: float) -> Finding:
    """The largest difference over the largest magnitude of the exact tensor."""
    if found is None:
        return Finding(where=where, seen="nothing", expected="a tensor", holds=False)
    if found.shape != exact.shape:
        return equals(where, f"shape {list(found.shape)}", f"shape {list(exact.shape)}")
    if exact.numel() == 0:
        return equals(where, "no element", "no element")
    size = exact.abs().max().clamp_min(1e-300)
    seen = ((found.detach().double() - exact.detach()).abs().max() / size).item()
    return Finding(where=f"{where}, error", seen=seen, expected=allowed, holds=seen <= allowed)


def same_bits(where: str, left: Tensor, right: Tensor) -> Finding:
    """Two tensors that have to be equal in every bit."""
    same = left.dtype == right.dtype and torch.equal(_bits(left), _bits(right))
    differ = 0 if same else int((left != right).sum()) if left.shape == right.shape else left.numel()
    return Finding(where=where, seen=f"{differ} elements differ" if not same else "same bits", expected="same bits",
                   holds=same)  # fmt: skip


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def each(findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings of a case, or that the case is skipped if it does not exist."""
    try:
        yield from findings
    except NotApplicable as reason:
        yield skipped(reason)
