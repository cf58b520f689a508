"""The short table of the operator: our share of the copy bandwidth, and how much longer each peer takes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from attnres.bench.floor import rows_moved
from attnres.bench.results import read
from attnres.errors import ConfigError

OURS = ("attnres (cpu)", "attnres (triton)")
"""Forms with a kernel of ours."""

Row = Mapping[str, str]
Run = dict[tuple[str, str], Row]
"""The rows of one problem in one run, by form and direction."""


def summary(path: Path) -> str:
    """One line per shape and dtype, each from its newest run on the device of the file's last row.

    Shares are of the measured copy bandwidth. The backward is the difference of forward with backward and forward, and
    moves ``2 n + 1`` rows. A peer's column holds its forward and its forward with backward as multiples of ours.

    Raises:
        ConfigError: The file has no rows.
    """
    problems = _newest_runs(read(path))
    if not problems:
        raise ConfigError(f"{path} has no rows; allowed: a result file of attnres bench op")
    peers = list(dict.fromkeys(form for run in problems.values() for form, _ in run if form not in OURS))
    header = ["sources x tokens x dim", "forward", "backward", *peers]
    lines = [header, *(_line(problem, run, peers) for problem, run in problems.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "\n".join(padded)


def _newest_runs(rows: Sequence[Row]) -> dict[tuple[str, ...], Run]:
    """For each shape and dtype the newest run that timed it."""
    runs: dict[tuple[str, ...], dict[str, Run]] = {}
    for row in rows:
        if row["processor"] == rows[-1]["processor"] and row["direction"] != "one token":
            problem = (row["sources"], row["tokens"], row["dim"], row["dtype"])
            runs.setdefault(problem, {}).setdefault(row["date"], {})[row["form"], row["direction"]] = row
    return {
        problem: next((run for run in reversed(by_date.values()) if _times_ours(run)), list(by_date.values())[-1])
        for problem, by_date in runs.items()
    }


def _times_ours(run: Run) -> bool:
    return any(form in OURS and direction == "forward+backward" for form, direction in run)


def _line(problem: Sequence[str], run: Run, peers: Sequence[str]) -> list[str]:
    size = f"{'x'.join(problem[:3])} {problem[3]}"
    own = {direction: row for (form, direction), row in run.items() if form in OURS}
    if not _times_ours(run):
        return [size, own["gate"]["note"] if "gate" in own else "not timed", *[""] * (len(peers) + 1)]
    forward, both = (float(own[direction]["median_ms"]) for direction in ("forward", "forward+backward"))
    shares = [1 / float(own["forward"]["floor_multiple"]), _backward_share(int(problem[0]), own, forward, both)]
    return [size, *(f"{share:.0%}" for share in shares), *(_peer(run, peer, forward, both) for peer in peers)]


def _backward_share(sources: int, own: Mapping[str, Row], forward: float, both: float) -> float:
    total = rows_moved(sources, "forward+backward")
    floor = float(own["forward+backward"]["floor_ms"]) * (total - rows_moved(sources, "forward")) / total
    return floor / (both - forward) if both > forward else float("nan")


def _peer(run: Run, peer: str, forward: float, both: float) -> str:
    if (peer, "gate") in run:
        return run[peer, "gate"]["note"].split(":")[0].split(" in the ")[0]
    rows = [run.get((peer, direction)) for direction in ("forward", "forward+backward")]
    return " ".join(
        "-" if row is None else f"{float(row['median_ms']) / mine:.2f}x"
        for row, mine in zip(rows, (forward, both), strict=True)
    )
