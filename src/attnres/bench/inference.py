"""Inference of a whole model against the plain one of the same weights: first token, next token, and the bank's size.

The time to the first token is that of a prompt, in one forward or in chunks against one cache, to the logits of its
last position. The time of the next token is a forward of one token against a cache that holds a prompt: eager with a
cache that grows, compiled with one of fixed size, so that every step has the same shapes. Short chunks take a prompt
of fewer tokens, since a prompt token by token costs as much as that many next tokens.

All arms are in memory at once and take turns run by run (A B B A), so a ratio is one of two runs of the same round.
They are timed with small random pseudo-queries, as a trained model has. Before, each is held against the plain model
at zero queries, where with the read scale ``"sum"`` it is the same function: whole, in each size of chunk, and one
token further. A compiled arm is held against itself, eager.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from attnres.bench.bank import Bank
from attnres.bench.models import PLAIN, ModelShape, draw_tokens, make_arms, time_columns, with_strategy
from attnres.bench.progress import say
from attnres.bench.results import significant
from attnres.bench.timing import Clock, Times, interleaved, wall_clock
from attnres.errors import ConfigError
from attnres.residual import Residual

FIRST, NEXT = "first token", "next token"
ALLOWED = {"float32": 1e-5, "bfloat16": 5e-2}
"""Largest error of the logits relative to the largest logit."""
_GATE_TOKENS = 40
_WARM_UPS = 2


@dataclass(frozen=True, kw_only=True)
class InferenceRow:
    """One arm at one task."""

    task: str
    """``"first token"`` or ``"next token"``."""
    arm: str
    precision: str
    compiled: bool
    layers: int
    dim: int
    vocab: int
    blocks: int
    prompt: int
    """Tokens of the prompt; of the next token, those in the cache at the first step."""
    chunk: int
    """Tokens per forward; the whole prompt, a part of it, or 1."""
    error: float | None = None
    """Of the arm's logits, relative to the largest: worst found before timing."""
    allowed: float
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
    bank_bytes: int | None = None
    """Largest size of a state's sources during the run."""
    formula_bytes: int | None = None
    """The sources that the last read sees, ``blocks + 1`` for Block, times chunk, width and bytes a number."""
    older_bytes: int | None = None
    """Largest size of sources of older states that were still alive."""
    ahead_bytes: int | None = None
    """Largest size of a state's results of phase 1."""
    note: str = ""
    """Why an arm was not timed."""


@dataclass(frozen=True, kw_only=True)
class InferenceBench:
    """Settings of `measure`."""

    shape: ModelShape
    prompt: int
    """Tokens of the prompt when it is taken whole; the most that chunks take."""
    chunks: tuple[int, ...]
    """Sizes of chunks."""
    most_chunks: int
    """Forwards of a chunked prompt; shorter chunks make a shorter prompt."""
    cached: int
    """Tokens in the cache at the first step of the next token."""
    precisions: tuple[str, ...]
    device: torch.device
    compiled: bool = True
    """Also time the next token compiled."""
    rounds: int = 6
    decode_rounds: int = 40

    def __post_init__(self) -> None:
        for name in ("prompt", "most_chunks", "cached", "rounds", "decode_rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: 1 or more")
        for chunk in self.chunks:
            if not 1 <= chunk < self.prompt:
                raise ConfigError(f"a chunk is {chunk}; allowed: 1 to {self.prompt - 1}, below the prompt")

    def prompts(self) -> Iterator[tuple[int, int]]:
        """Length of the prompt and of its chunks, the whole prompt first."""
        yield self.prompt, self.prompt
        for chunk in self.chunks:
            yield min(self.prompt, chunk * self.most_chunks), chunk


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What all rows of one task in one precision have in common."""

    bench: InferenceBench
    precision: str
    errors: Mapping[str, float]

    @property
    def allowed(self) -> float:
        return ALLOWED[self.precision]

    def columns(self, task: str, prompt: int, chunk: int, *, compiled: bool = False) -> dict[str, Any]:
        shape = self.bench.shape
        sizes = {"layers": shape.layers, "dim": shape.dim, "vocab": shape.vocab, "blocks": shape.blocks}
        kind = {"task": task, "precision": self.precision, "compiled": compiled, "allowed": self.allowed}
        return {**kind, **sizes, "prompt": prompt, "chunk": chunk}


@torch.no_grad()
def measure(bench: InferenceBench) -> Iterator[InferenceRow]:
    """The gate, the first token whole and in chunks, and the next token, in each precision."""
    for precision in bench.precisions:
        say(f"inference {precision}: checking")
        arms = make_arms(bench.shape, bench.device, dtype=getattr(torch, precision))
        for model in arms.values():
            model.eval()
        part = _Part(bench=bench, precision=precision, errors=errors_at_zero_queries(bench, arms[PLAIN]))
        columns = part.columns(FIRST, bench.prompt, bench.prompt)
        yield from _take_out(arms, part.errors, "at zero queries", columns)
        for prompt, chunk in bench.prompts():
            yield from _measure_first(part, arms, prompt, chunk)
        yield from _measure_next(part, arms)
        if bench.compiled:
            yield from _measure_next_compiled(part, arms)


def errors_at_zero_queries(bench: InferenceBench, plain: Any) -> dict[str, float]:
    """Largest error of each arm's logits against the plain model's whole forward, relative to the largest logit.

    Whole, in every size of chunk, and one token after the prompt; of the plain model too, whose own attention rounds
    differently in chunks.
    """
    strategies = {name: strategy.with_read_scale("sum") for name, strategy in bench.shape.strategies.items()}
    models = {PLAIN: plain, **{name: with_strategy(plain, s, plain.dtype) for name, s in strategies.items()}}
    tokens = draw_tokens(bench.shape, 1, min(bench.prompt, _GATE_TOKENS) + 1, bench.device)
    cuts = sorted({tokens.shape[1] - 1, *(chunk for chunk in bench.chunks if chunk < tokens.shape[1] - 1)})
    truth = [_logits(plain, part, None) for part in (tokens[:, :-1], tokens)]
    return {name: max(_errors(model.eval(), tokens, cuts, truth)) for name, model in models.items()}


def _errors(model: Any, tokens: Tensor, cuts: Sequence[int], truth: Sequence[Tensor]) -> Iterator[float]:
    for chunk in cuts:
        yield from map(_error, _steps(model, tokens, chunk), truth)


def _steps(model: Any, tokens: Tensor, chunk: int) -> list[Tensor]:
    """Logits after the prompt (all tokens but the last), in chunks, and after one token more."""
    cache = DynamicCache(config=model.config)
    return [_in_chunks(model, tokens[:, :-1], chunk, cache), _logits(model, tokens[:, -1:], cache)]


def _error(found: Tensor, true: Tensor) -> float:
    error = ((found.double() - true.double()).abs().max() / true.double().abs().max()).item()
    return error if error == error else float("inf")


def _take_out(
    arms: dict[str, Any], errors: Mapping[str, float], where: str, columns: dict[str, Any]
) -> Iterator[InferenceRow]:
    """Take wrong arms out, with a row on each; the plain model stays, since it is what others are compared to."""
    for name, error in errors.items():
        if name != PLAIN and name in arms and not error <= columns["allowed"]:
            note = f"wrong by {error:.2g} {where} (allowed {columns['allowed']:.2g})"
            say(f"  {name}: {note}; not timed")
            del arms[name]
            yield InferenceRow(arm=name, error=_rounded(error), note=note, **columns)


def _measure_first(part: _Part, arms: Mapping[str, Any], prompt: int, chunk: int) -> Iterator[InferenceRow]:
    bench, label = part.bench, f"inference {part.precision}: first token of {prompt} in chunks of {chunk}"
    tokens = draw_tokens(bench.shape, 1, prompt, bench.device)
    runs = {name: _first(model, tokens, chunk) for name, model in arms.items()}
    banks = {}
    for name, run in runs.items():  # warms up as well
        say(f"{label}, {name}")
        banks[name] = _bank(part, arms[name], run, chunk)
    say(label)
    times = interleaved(runs, wall_clock(bench.device), rounds=bench.rounds)
    yield from _rows(times, part.errors, part.columns(FIRST, prompt, chunk), banks)


def _measure_next(part: _Part, arms: Mapping[str, Any]) -> Iterator[InferenceRow]:
    bench = part.bench
    clock = wall_clock(bench.device)
    cached = draw_tokens(bench.shape, 1, bench.cached, bench.device)
    runs = {name: _next(model, cached, DynamicCache(config=model.config)) for name, model in arms.items()}
    _warm_up(runs, clock)
    say(f"inference {part.precision}: next token")
    times = interleaved(runs, clock, rounds=bench.decode_rounds)
    yield from _rows(times, part.errors, part.columns(NEXT, bench.cached, 1))


def _measure_next_compiled(part: _Part, arms: dict[str, Any]) -> Iterator[InferenceRow]:
    bench = part.bench
    clock = wall_clock(bench.device)
    cached = draw_tokens(bench.shape, 1, bench.cached, bench.device)
    columns = part.columns(NEXT, bench.cached, 1, compiled=True)
    length = bench.cached + 1 + _WARM_UPS + bench.decode_rounds
    torch.compiler.reset()
    runs, errors = {}, {}
    for name, model in arms.items():
        say(f"inference {part.precision}: compiling the next token, {name}")
        cache = StaticCache(config=model.config, max_cache_len=length)
        runs[name] = _next(model, cached, cache, torch.compile(model, dynamic=False))
        eager = _next(model, cached, DynamicCache(config=model.config))
        errors[name] = _error(runs[name](), eager())
    arms = dict(arms)
    yield from _take_out(arms, errors, "against the eager arm", columns)
    runs = {name: runs[name] for name in arms}
    _warm_up(runs, clock)
    say(f"inference {part.precision}: next token, compiled")
    yield from _rows(interleaved(runs, clock, rounds=bench.decode_rounds), errors, columns)


def _warm_up(runs: Mapping[str, Callable[[], Any]], clock: Clock) -> None:
    for run in runs.values():
        for _ in range(_WARM_UPS):
            clock(run)


def _first(model: Any, tokens: Tensor, chunk: int) -> Callable[[], Tensor]:
    @torch.no_grad()
    def first() -> Tensor:
        return _in_chunks(model, tokens, chunk, DynamicCache(config=model.config))

    return first


def _next(model: Any, cached: Tensor, cache: Any, run: Any = None) -> Callable[[], Tensor]:
    """One token further each time it is called; ``run`` is what then stands for the model."""
    with torch.no_grad():
        _logits(model, cached, cache)

    @torch.no_grad()
    def step() -> Tensor:
        return _logits(model if run is None else run, cached[:, :1], cache)

    return step


def _in_chunks(model: Any, tokens: Tensor, chunk: int, cache: Any) -> Tensor:
    """Logits of the last position of a prompt, taken in chunks against one cache."""
    return [_logits(model, part, cache) for part in tokens.split(chunk, dim=1)][-1]


def _logits(run: Any, tokens: Tensor, cache: Any) -> Tensor:
    return run(input_ids=tokens, cache=cache, use_cache=cache is not None, logits_to_keep=1).logits


def _bank(part: _Part, model: Any, run: Callable[[], Any], chunk: int) -> dict[str, Any]:
    """The columns on the bank, from one run that is not timed; none for the plain model."""
    residual = next((module for module in model.modules() if isinstance(module, Residual)), None)
    if residual is None:
        run()
        return {}
    bank = Bank()
    with residual.listen(bank):
        run()
    count = len(residual.strategy.sources(residual.num_sublayers, residual.num_sublayers))
    return {
        "bank_bytes": bank.largest,
        "formula_bytes": count * chunk * part.bench.shape.dim * getattr(torch, part.precision).itemsize,
        "older_bytes": bank.largest_older,
        "ahead_bytes": bank.largest_ahead,
    }


def _rows(
    times: Times,
    errors: Mapping[str, float],
    columns: dict[str, Any],
    banks: Mapping[str, dict[str, Any]] | None = None,
) -> Iterator[InferenceRow]:
    for name in times:
        yield InferenceRow(
            arm=name,
            error=_rounded(errors[name]),
            **time_columns(times, name),
            **columns,
            **((banks or {}).get(name, {})),
        )


def _rounded(error: float) -> float:
    return significant(error, 2)
