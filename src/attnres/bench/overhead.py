"""What a residual strategy costs a whole model: training step, prefill and decoding, as ratios to PreNorm.

PreNorm is there twice: the plain Hugging Face model, and the model built with our PreNorm strategy, which has the same
layers as the other arms. Ratios are given to both.

All arms are in memory at once and take turns step by step (A B B A), so a ratio is one of two steps of the same round.
A step is forward, loss, backward and, if asked for, the optimizer; gradients are dropped after it, outside the clock.
Prefill is one forward of a long prompt that fills a new cache. Decoding is a forward of one token against a cache that
holds a prompt and grows as it goes. Training in bfloat16 is autocast over float32 weights; inference has bfloat16
weights.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from attnres.bench.models import PLAIN, ModelShape, check_arms, draw_tokens, make_arms, time_columns
from attnres.bench.progress import say
from attnres.bench.timing import Times, interleaved, wall_clock
from attnres.errors import ConfigError

TRAINING, PREFILL, DECODE = "training step", "prefill", "decode"
ALLOWED = {"float32": 1e-3, "bfloat16": 1e-1}
"""Largest relative difference to the plain model at zero queries, of the loss and of each weight's gradient."""


@dataclass(frozen=True, kw_only=True)
class OverheadRow:
    """One arm at one task."""

    task: str
    """``"training step"``, ``"prefill"`` or ``"decode"`` (of one token)."""
    arm: str
    precision: str
    compiled: bool
    optimizer: bool
    """Whether the training step has one (AdamW)."""
    layers: int
    dim: int
    vocab: int
    blocks: int
    batch: int
    context: int
    """Tokens per sequence; in decoding, those in the cache at the first token."""
    median_ms: float | None = None
    low_ms: float | None = None
    """First quartile."""
    high_ms: float | None = None
    """Third quartile."""
    rounds: int | None = None
    ratio_to_plain: float | None = None
    """Median over the rounds of the time over that of the plain model in the same round."""
    ratio_low: float | None = None
    ratio_high: float | None = None
    ratio_to_prenorm: float | None = None
    """The same over the model built with the PreNorm strategy."""
    note: str = ""
    """Why an arm was not timed."""


@dataclass(frozen=True, kw_only=True)
class OverheadBench:
    """Settings of `measure`."""

    shape: ModelShape
    batch: int
    context: int
    prompt: int
    """Tokens of the prefill."""
    cached: int
    """Tokens in the cache when decoding starts."""
    precisions: tuple[str, ...]
    device: torch.device
    compiled: bool = False
    """Whole model under ``torch.compile``; decoding is left out, since every length of the cache would compile anew."""
    optimizer: bool = False
    rounds: int = 6
    decode_rounds: int = 40

    def __post_init__(self) -> None:
        for name in ("batch", "context", "prompt", "cached", "rounds", "decode_rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: 1 or more")


def measure(bench: OverheadBench) -> Iterator[OverheadRow]:
    """Training, then prefill and decoding, in each precision."""
    for precision in bench.precisions:
        yield from _measure_training(bench, precision)
        yield from _measure_inference(bench, precision)


def _measure_training(bench: OverheadBench, precision: str) -> Iterator[OverheadRow]:
    say(f"overhead {precision}: checking")
    arms = make_arms(bench.shape, bench.device)
    few = draw_tokens(bench.shape, 1, min(bench.context, 32), bench.device)
    with _autocast(bench.device, precision):
        wrong = check_arms(bench.shape, arms[PLAIN], few, allowed=ALLOWED[precision])
    columns = _columns(bench, TRAINING, precision, batch=bench.batch, context=bench.context)
    yield from _report_wrong(arms, wrong, columns)
    tokens = draw_tokens(bench.shape, bench.batch, bench.context, bench.device)
    steps = {name: _training_step(bench, model, tokens, precision) for name, model in arms.items()}
    clock = _dropping_gradients(wall_clock(bench.device), arms)
    for name, step in steps.items():
        say(f"overhead {precision}: warming up the training step, {name}")
        clock(step)
    say(f"overhead {precision}: training step")
    yield from _rows(interleaved(steps, clock, rounds=bench.rounds), columns)


def _measure_inference(bench: OverheadBench, precision: str) -> Iterator[OverheadRow]:
    arms = make_arms(bench.shape, bench.device, dtype=getattr(torch, precision))
    for model in arms.values():
        model.eval()
    clock = wall_clock(bench.device)
    prompt = draw_tokens(bench.shape, 1, bench.prompt, bench.device)
    prefills = {name: _prefill(_compiled(bench, model), prompt) for name, model in arms.items()}
    for name, run in prefills.items():
        say(f"overhead {precision}: warming up prefill, {name}")
        for _ in range(2):  # compiled code is made anew once, when the first cache has come and gone
            clock(run)
    say(f"overhead {precision}: prefill")
    columns = _columns(bench, PREFILL, precision, batch=1, context=bench.prompt)
    yield from _rows(interleaved(prefills, clock, rounds=bench.rounds), columns)
    if not bench.compiled:
        cached = draw_tokens(bench.shape, 1, bench.cached, bench.device)
        decoders = {name: _decode(model, cached) for name, model in arms.items()}
        for run in decoders.values():
            clock(run)
        say(f"overhead {precision}: decode")
        columns = _columns(bench, DECODE, precision, batch=1, context=bench.cached + 1)
        yield from _rows(interleaved(decoders, clock, rounds=bench.decode_rounds), columns)


def _report_wrong(arms: dict[str, Any], wrong: Mapping[str, str], columns: dict[str, Any]) -> Iterator[OverheadRow]:
    """Take wrong arms out, with a row on each."""
    for name, note in wrong.items():
        say(f"  {name}: {note}; not timed")
        del arms[name]
        yield OverheadRow(arm=name, note=note, **columns)


def _training_step(bench: OverheadBench, model: Any, tokens: Tensor, precision: str) -> Callable[[], None]:
    model.train()
    run = _compiled(bench, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6) if bench.optimizer else None

    def step() -> None:
        with _autocast(bench.device, precision):
            loss = run(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()

    return step


def _dropping_gradients(clock: Callable[..., float], arms: Mapping[str, Any]) -> Callable[[Callable[[], Any]], float]:
    """A clock after which no arm holds gradients."""

    def seconds(function: Callable[[], Any]) -> float:
        took = clock(function)
        for model in arms.values():
            model.zero_grad(set_to_none=True)
        return took

    return seconds


def _prefill(run: Any, prompt: Tensor) -> Callable[[], Any]:
    @torch.no_grad()
    def prefill() -> Any:
        return run(input_ids=prompt, use_cache=True, logits_to_keep=1)

    return prefill


def _decode(model: Any, cached: Tensor) -> Callable[[], Any]:
    """One token further each time it is called, against a cache of its own."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=cached, cache=cache, use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def decode() -> Any:
        return model(input_ids=cached[:, :1], cache=cache, use_cache=True, logits_to_keep=1).logits

    return decode


def _compiled(bench: OverheadBench, model: Any) -> Any:
    return torch.compile(model, dynamic=False) if bench.compiled else model


def _autocast(device: torch.device, precision: str) -> Any:
    return nullcontext() if precision == "float32" else torch.autocast(device.type, getattr(torch, precision))


def _columns(bench: OverheadBench, task: str, precision: str, *, batch: int, context: int) -> dict[str, Any]:
    shape = bench.shape
    return {
        "task": task,
        "precision": "bfloat16 autocast" if task == TRAINING and precision == "bfloat16" else precision,
        "compiled": bench.compiled,
        "optimizer": bench.optimizer and task == TRAINING,
        "layers": shape.layers,
        "dim": shape.dim,
        "vocab": shape.vocab,
        "blocks": shape.blocks,
        "batch": batch,
        "context": context,
    }


def _rows(times: Times, columns: dict[str, Any]) -> Iterator[OverheadRow]:
    for name in times:
        yield OverheadRow(
            arm=name,
            **time_columns(times, name),
            **columns,
        )
