"""The tables of the documentation, made from the result files, so that no number on the page was typed."""

from collections.abc import Callable, Sequence
from pathlib import Path

from attnres.bench.results import read
from attnres.errors import ConfigError

Rows = Sequence[dict[str, str]]


def tables(folder: Path) -> dict[str, str]:
    """Markdown tables of the last run of each benchmark, by the benchmark's name.

    Raises:
        ConfigError: A result file is missing or empty.
    """
    return {name: make(_results(folder / f"{name}.csv")) for name, make in _TABLES.items()}


def update(page: Path, folder: Path) -> None:
    """Put the tables between their marks, ``<!-- NAME -->`` and ``<!-- /NAME -->``, in a Markdown page.

    Raises:
        ConfigError: A result file or a mark is missing.
    """
    text = page.read_text(encoding="utf-8")
    for name, table in tables(folder).items():
        before, opening, rest = text.partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition(f"<!-- /{name} -->")
        if not opening or not closing:
            raise ConfigError(f"{page} lacks the marks <!-- {name} --> and <!-- /{name} -->; allowed: a page with both")
        text = f"{before}{opening}\n{table}\n\n{closing}{after}"
    page.write_text(text, encoding="utf-8")


def _results(path: Path) -> Rows:
    rows = read(path) if path.exists() else []
    if not rows:
        raise ConfigError(f"{path} has no results; allowed: a folder that `attnres bench NAME --csv` wrote to")
    return rows


def _last_run(rows: Rows) -> Rows:
    return [row for row in rows if row["date"] == rows[-1]["date"]]


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]], rows: Rows) -> str:
    first = rows[0]
    where = (
        f"{first['date'][:10]}, {first['processor']}, {first['threads']} threads, torch {first['torch']}, "
        f"attnres {first['attnres']} {first['commit']}, load average {first['load_average']} at the start."
    )
    table = [header, [":---", *["---:"] * (len(header) - 1)], *lines]
    return "\n".join(["| " + " | ".join(line) + " |" for line in table]) + f"\n\n{where}"


def _pivot(rows: Rows, row_key: Callable[[dict[str, str]], str], column_key: Callable[[dict[str, str]], str],
           cell: Callable[[dict[str, str]], str], corner: str) -> str:  # fmt: skip
    names, columns = (list(dict.fromkeys(map(key, rows))) for key in (row_key, column_key))
    cells = {(row_key(row), column_key(row)): cell(row) for row in rows}
    return _markdown([corner, *columns], [[n, *(cells.get((n, c), "") for c in columns)] for n in names], rows)


def _op(rows: Rows) -> str:
    reads, tokens = ([row for row in rows if (int(row["tokens"]) == 1) == single] for single in (False, True))
    reads = _last_run(reads)
    timed = [row for row in reads if row["direction"].startswith("forward")]
    tables = []
    for dtype in dict.fromkeys(row["dtype"] for row in timed):
        part = [row for row in timed if row["dtype"] == dtype]
        table = _pivot(
            part,
            lambda row: row["form"],
            lambda row: f"{row['sources']}x{row['tokens']}x{row['dim']} {_short(row['direction'])}",
            lambda row: f"{float(row['floor_multiple']):.2f}" if row["floor_multiple"] else "",
            dtype,
        )
        tables.append(table)
    tables.append(_refused(reads) + (_latency(_last_run(tokens)) if tokens else ""))
    return "\n\n".join(tables)


def _short(direction: str) -> str:
    return "fwd" if direction == "forward" else "fwd+bwd"


def _refused(rows: Rows) -> str:
    notes = [
        f"{row['form']} ({row['sources']}x{row['tokens']}x{row['dim']} {row['dtype']}): {row['note']}"
        for row in rows
        if row["direction"] == "gate"
    ]
    return "Not timed, because wrong: " + "; ".join(notes) + ".\n\n" if notes else ""


def _latency(rows: Rows) -> str:
    single = [row for row in rows if row["median_ms"]]
    lines = [
        [row["form"], row["dtype"], *(f"{1e3 * float(row[name]):.1f}" for name in ("median_ms", "low_ms", "high_ms"))]
        for row in single
    ]
    return _markdown(["one token, µs a read", "dtype", "median", "low", "high"], lines, single) if single else ""


def _phases(rows: Rows) -> str:
    return _pivot(
        _last_run(rows),
        lambda row: row["arm"],
        lambda row: f"{row['sublayers']} {_short(row['direction'])}",
        lambda row: f"{float(row['median_ms']):.0f} ({float(row['ratio_to_one_phase']):.2f})",
        "ms (ratio to one phase)",
    )


def _overhead(rows: Rows) -> str:
    return _pivot(
        _last_run(rows),
        lambda row: row["arm"],
        lambda row: f"{row['task']}, {row['precision']}",
        _ratio,
        "ratio to plain [quartiles]",
    )


def _ratio(row: dict[str, str]) -> str:
    if not row["ratio_to_plain"]:
        return row["note"]
    return f"{float(row['ratio_to_plain']):.3f} [{float(row['ratio_low']):.3f}, {float(row['ratio_high']):.3f}]"


def _inference(rows: Rows) -> str:
    rows = _last_run(rows)
    tables = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        part = [row for row in rows if row["precision"] == precision]
        tables.append(
            _pivot(part, lambda row: row["arm"], _task, _time_or_ratio, f"{precision}: ratio to plain [quartiles]")
        )
    banks = [row for row in rows if row["bank_bytes"]]
    tables.append(
        _pivot(
            banks,
            lambda row: f"{row['arm']}, {row['precision']}",
            lambda row: f"{row['chunk']} of {row['prompt']} tokens",
            _bank,
            "MiB of the bank (over the formula), of older states, of phase 1",
        )
    )
    return "\n\n".join(tables)


def _time_or_ratio(row: dict[str, str]) -> str:
    """The plain model's ratio to itself says nothing; its time does."""
    return f"{float(row['median_ms']):.1f} ms" if row["arm"] == "plain" else _ratio(row)


def _task(row: dict[str, str]) -> str:
    if row["task"] == "next token":
        return "next token, compiled" if row["compiled"] == "True" else "next token"
    whole = row["chunk"] == row["prompt"]
    return f"first token of {row['prompt']}" + ("" if whole else f", chunks of {row['chunk']}")


def _bank(row: dict[str, str]) -> str:
    names = ("bank_bytes", "formula_bytes", "older_bytes", "ahead_bytes")
    bank, formula, older, ahead = (int(row[name]) for name in names)
    return f"{bank / 2**20:.3g} ({bank / formula:.3f}), {older / 2**20:.3g}, {ahead / 2**20:.3g}"


def _memory(rows: Rows) -> str:
    rows = _last_run(rows)
    saved, peaks = ([row for row in rows if bool(row["layers"]) == peak] for peak in (False, True))
    kept = _pivot(
        saved,
        lambda row: row["arm"],
        lambda row: f"{row['dtype']}, {row['sources']}x{row['tokens']}x{row['dim']}",
        lambda row: f"{float(row['units']):.2f}",
        "kept for backward by one read, in [T, D]",
    )
    peak = _pivot(
        peaks,
        lambda row: f"{row['arm']}, {'with' if row['checkpointing'] == 'True' else 'without'} checkpointing",
        lambda row: f"{row['layers']} layers",
        lambda row: f"{float(row['units_over_prenorm']):.1f} ({row['sources']})",
        "peak of a step over PreNorm in [T, D] (sources)",
    )
    return f"{kept}\n\n{peak}"


def _pipeline(rows: Rows) -> str:
    names = {"off": "off", "received": "what it received (the paper)", "all": "also what it made"}
    lines = [
        [
            row["virtual"],
            names[row["cache"]],
            f"{int(row['block_bytes']) / 2**20:.1f} ({int(row['block_bytes']) / int(row['formula_bytes']):.3f})",
            f"{int(row['forward_bytes']) / 2**20:.1f}",
            f"{int(row['backward_bytes']) / 2**20:.1f}",
            f"{int(row['largest_hop_bytes']) / 2**20:.2f}",
            f"{int(row['held_bytes']) / 2**20:.1f}",
            f"{float(row['median_ms']):.0f}",
            f"{float(row['ratio_to_off']):.3f} [{float(row['ratio_low']):.3f}, {float(row['ratio_high']):.3f}]",
        ]
        for row in _last_run(rows)
    ]
    header = [
        "V",
        "a rank keeps",
        "block sums, MiB (over the formula)",
        "forward, MiB",
        "backward, MiB",
        "largest hop, MiB",
    ]
    return _markdown([*header, "held, MiB", "step, ms", "ratio to off [quartiles]"], lines, _last_run(rows))


_TABLES: dict[str, Callable[[Rows], str]] = {
    "op": _op,
    "phases": _phases,
    "overhead": _overhead,
    "memory": _memory,
    "inference": _inference,
    "pipeline": _pipeline,
}
