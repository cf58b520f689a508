"""The bytes that pipelines really send, beside the paper's formulas: ``python -m attnres.bench.ledger OUT``.

Runs one training step of a small model on processes of this machine for a grid of ranks P, stages V on each and blocks
N_p in each stage, and the paper's worked example hop by hop. Writes ``ledger.json`` and ``ledger.md``; exit status 1
where a number is not the formula's.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from attnres.bench.ranks import ARMS, FORMULAS, cross_entropy, on_ranks, random_batches
from attnres.models import build
from attnres.parallel.layout import SOURCE_KINDS
from attnres.parallel.pipeline import Pipeline
from attnres.parallel.plan import Cache
from attnres.residual import BlockAttnRes

DIM, ROWS, TOKENS, MICROBATCHES = 16, 2, 8, 4
SOURCE_BYTES = ROWS * TOKENS * DIM * 4
"""One source of a micro-batch, in float32."""
NAMES = {"off": "without cache", "received": "cached (paper)", "all": "own reused"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline: P ranks, V stages on each, N_p blocks in each stage, or 1/2 where a block spans two stages."""

    ranks: int
    virtual: int
    blocks_per_stage: str

    @property
    def sublayers(self) -> int:
        """Depth: stages of as many sublayers as blocks, or of one with blocks of two."""
        return int(max(1, Fraction(self.blocks_per_stage)) * self.ranks * self.virtual)

    @property
    def strategy(self) -> BlockAttnRes:
        """Blocks of one sublayer, or of two."""
        return BlockAttnRes(sublayers_per_block=2 if Fraction(self.blocks_per_stage) < 1 else 1)


GRID = [Case(ranks=p, virtual=v, blocks_per_stage=str(n)) for p, v, n in product((2, 4), (1, 2, 3), (1, 2))]
FIGURE_3 = Case(ranks=4, virtual=2, blocks_per_stage="1/2")


def main(arguments: Sequence[str]) -> int:
    """Run all cases and write the files."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m attnres.bench.ledger OUT", file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    out = Path(arguments[0])
    by_ranks = {ranks: [case for case in [*GRID, FIGURE_3] if case.ranks == ranks] for ranks in (2, 4)}
    rows = [row for ranks, cases in by_ranks.items() for row in on_ranks(ranks, _rows, cases)]
    out.mkdir(parents=True, exist_ok=True)
    (out / "ledger.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (out / "ledger.md").write_text(_markdown(rows), encoding="utf-8")
    wrong = [row for row in rows if not row["agrees"]]
    print(f"{out}: {len(rows)} pipelines, {len(wrong)} not as the formula says")
    return 1 if wrong else 0


def _rows(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """What the ranks do: all cases one after the other."""
    return [_row(case, cache) for case in cases for cache in ARMS]


def _row(case: Case, cache: Cache) -> dict[str, Any]:
    """A step, and what all ranks sent in it."""
    transfers = _step(case, cache)
    blocks = {
        direction: sum(t.bytes for t in transfers if t.kind == "block" and t.direction == direction)
        for direction in ("forward", "backward")
    }
    hops: dict[int, list[Any]] = {}
    for transfer in transfers:
        if transfer.direction == "forward" and transfer.micro_batch == 0:
            hops.setdefault(transfer.stage, []).append(transfer)
    formula = FORMULAS[cache](case.ranks, case.virtual, Fraction(case.blocks_per_stage)) * SOURCE_BYTES * MICROBATCHES
    whole = Fraction(case.blocks_per_stage).denominator == 1
    return {
        **asdict(case),
        "cache": cache,
        "formula_bytes": float(formula),
        "block_bytes_forward": blocks["forward"],
        "block_bytes_backward": blocks["backward"],
        "all_bytes_forward": sum(t.bytes for t in transfers if t.direction == "forward"),
        "all_bytes_backward": sum(t.bytes for t in transfers if t.direction == "backward"),
        "largest_hop_blocks": max(sum(t.kind == "block" for t in hop) for hop in hops.values()),
        "hops": [[t.key for t in sorted(hops[stage], key=_born) if t.kind in SOURCE_KINDS] for stage in sorted(hops)],
        "agrees": not whole or blocks["forward"] == blocks["backward"] == formula,
    }


def _step(case: Case, cache: Cache) -> list[Any]:
    torch.manual_seed(0)
    shape = {"hidden_size": DIM, "intermediate_size": 16, "num_attention_heads": 2, "tie_word_embeddings": False}
    config = LlamaConfig(vocab_size=32, num_hidden_layers=-(-case.sublayers // 2), **shape)
    model = build(config, case.strategy, dtype=torch.float32)
    schedule = "1f1b" if case.virtual == 1 else "interleaved1f1b"
    pipeline = Pipeline(model, microbatches=MICROBATCHES, schedule=schedule, virtual=case.virtual, cache=cache)
    pipeline.step(random_batches(MICROBATCHES, ROWS, TOKENS, vocab=32), cross_entropy)
    told: list[Any] = [None] * case.ranks
    dist.all_gather_object(told, pipeline.ledger.rows)
    return [row for rows in told for row in rows]


def _born(transfer: Any) -> int:
    return int("".join(filter(str.isdigit, transfer.key)) or 0)


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    return "\n".join([*_grid_table(rows), "", *_example_table(rows), ""])


def _grid_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "Finished block sums sent in one step, forward, in bytes; gradients sent back are as many."
    yield ""
    yield ("| P | V | N_p | " + " | ".join(f"{NAMES[c]}: ledger | formula" for c in ARMS) + " | largest hop, blocks |")
    yield "|" + "---:|" * 10
    whole = [row for row in rows if "/" not in row["blocks_per_stage"]]
    for case in dict.fromkeys((row["ranks"], row["virtual"], row["blocks_per_stage"]) for row in whole):
        mine = {r["cache"]: r for r in whole if (r["ranks"], r["virtual"], r["blocks_per_stage"]) == case}
        cells = [f"{mine[c]['block_bytes_forward']:,} | {int(mine[c]['formula_bytes']):,}" for c in ARMS]
        largest = " / ".join(str(mine[c]["largest_hop_blocks"]) for c in ARMS)
        yield f"| {' | '.join(map(str, case))} | {' | '.join(cells)} | {largest} |"


def _example_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    example = {row["cache"]: row["hops"] for row in rows if "/" in row["blocks_per_stage"]}
    yield "The paper's worked example (Fig. 3): P = 4, V = 2, a block spans two stages. Sources that each hop sends,"
    yield "the embedding E among them; `b2`, `b4` and `b6` end after 2, 4 and 6 sublayers: the paper's b1, b2 and b3."
    yield ""
    yield "| hop to stage | on rank | " + " | ".join(NAMES[cache] for cache in ARMS) + " |"
    yield "|---:|---:|" + "---|" * len(ARMS)
    for index in range(7):
        yield (f"| {index + 1} | {(index + 1) % 4} | " + " | ".join(", ".join(example[c][index]) for c in ARMS) + " |")
    totals = " | ".join(str(sum(map(len, example[cache]))) for cache in ARMS)
    yield f"| all | | {totals} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
