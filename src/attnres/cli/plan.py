"""``attnres plan``: what a run on many accelerators will cost, from its sizes alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from attnres.cli.parsing import parse
from attnres.errors import ConfigError
from attnres.experiments.arms import parse_arm
from attnres.parallel.planning.hardware import Efficiency
from attnres.parallel.planning.report import PlanReport, make_report
from attnres.parallel.planning.request import PlanRequest
from attnres.parallel.planning.table import Table

WIDTH = 120
"""Columns that every table fits."""


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parse(plan, arguments, command="plan")


def plan(
    *,
    model: str | None = None,
    config: Path | None = None,
    residual: str | None = None,
    pipeline: int = 1,
    virtual: int = 1,
    tensor: int = 1,
    data: int = 1,
    sharding: Literal["ddp", "fsdp"] = "ddp",
    microbatches: int = 8,
    schedule: str | None = None,
    context: int = 4096,
    micro_batch_size: int = 1,
    cuts: tuple[int, ...] = (),
    balance: bool = False,
    cache: Literal["all", "received", "off"] = "all",
    gpu: str = "h200",
    link: str = "node",
    optimizer: Literal["adamw", "muon"] = "adamw",
    checkpointing: bool = True,
    prompt: int = 131072,
    chunk: int = 16384,
    efficiency: Efficiency = Efficiency(),  # noqa: B008  # frozen
    timeline: Path | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    markdown: bool = False,
) -> None:
    """Say what a run will cost: parameters, operations, bytes moved and sent, memory, and step time over PreNorm's.

    Nothing is allocated and no process is started: the model is built on the meta device, and a step of the pipeline
    is simulated. Every number names its formula.

    Args:
        model: kimi-linear-48b, kimi-k3, llama-3.1-8b, llama-3.1-70b, llama-3.1-405b or qwen3-8b; or give config.
        config: A Hugging Face config.json.
        residual: Residual strategy, with settings as in block:sublayers_per_block=6; else what the model is usually
            planned with, which the output names.
        pipeline: Ranks of the pipeline.
        virtual: Stages on each of them.
        tensor: Ranks that share each sublayer, and the tokens of the residual path.
        data: Copies of all that.
        sharding: Between the copies: ddp keeps all weights on each, fsdp divides weights, gradients, optimizer state.
        microbatches: Micro-batches of a step, for each copy.
        schedule: gpipe, 1f1b, loopedbfs, interleaved1f1b, interleavedzerobubble, zbv or dualpipev; else 1f1b, or
            interleaved1f1b with several stages on a rank.
        context: Tokens of a sequence in training.
        micro_batch_size: Sequences of a micro-batch.
        cuts: Sublayers before each cut, ascending; else stages of equal length.
        balance: Choose cuts so that the slowest stage is as fast as can be, instead of stages of equal length.
        cache: What ranks keep: all, only what they received (the paper), or nothing (off).
        gpu: h100 or h200.
        link: nvlink or infiniband for every hop, or node: NVLink inside a node of eight, InfiniBand between nodes.
        optimizer: For its state.
        checkpointing: Recompute activations in the backward pass.
        prompt: Tokens of the prompt whose prefill is planned.
        chunk: Tokens of one forward of that prefill.
        efficiency: Shares of the data sheet that a run is assumed to reach.
        timeline: File for the simulated steps, event by event, as JSON.
        as_json: Print JSON.
        markdown: Print Markdown tables.
    """
    if as_json and markdown:
        raise ConfigError("both --json and --markdown are given; allowed is one of them")
    report = make_report(
        PlanRequest(
            model=model,
            config=config,
            residual=None if residual is None else parse_arm(residual),
            pipeline=pipeline,
            virtual=virtual,
            tensor=tensor,
            data=data,
            sharding=sharding,
            microbatches=microbatches,
            schedule=schedule,
            context=context,
            micro_batch_size=micro_batch_size,
            cuts=cuts or None,
            balance=balance,
            cache=cache,
            gpu=gpu,
            link=link,
            optimizer=optimizer,
            checkpointing=checkpointing,
            prompt=prompt,
            chunk=chunk,
            efficiency=efficiency,
        )
    )
    if timeline is not None:
        timeline.write_text(json.dumps(report.timeline()), encoding="utf-8")
    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
    elif markdown:
        print("\n".join([f"# {report.planned.size.name}\n", *map(_markdown, report.tables)]), end="")
    else:
        _print(report)


def _print(report: PlanReport) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console()
    console = console if console.is_terminal and console.width >= WIDTH else Console(width=WIDTH)
    for table in report.tables:
        console.print(table.title, style="bold", markup=False, highlight=False)
        console.print(_rich(table))
        for note in table.footnotes:
            console.print(Padding(Text(note), (0, 0, 0, 1)))
        console.print()


def _rich(table: Table) -> Any:
    from rich import box
    from rich.markup import escape
    from rich.table import Table as RichTable

    drawn = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for place in table.visible:
        side = "left" if _is_text(table, place) else "right"
        drawn.add_column(table.columns[place].title, justify=side, overflow="fold")
    for row in table.texts():
        drawn.add_row(*(escape(row[place]) for place in table.visible))
    return drawn


def _is_text(table: Table, place: int) -> bool:
    return table.columns[place].unit == "text"


def _markdown(table: Table) -> str:
    titles = [table.columns[place].title for place in table.visible]
    rules = ["---" if _is_text(table, place) else "---:" for place in table.visible]
    lines = [titles, rules, *([row[place] for place in table.visible] for row in table.texts())]
    body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    notes = "".join(f"\n- {note}" for note in table.footnotes)
    return f"## {table.title}\n\n{body}\n" + (f"{notes}\n" if notes else "")
