"""The inference benchmark: a gate that finds wrong arms, tasks that are what they say, and a bank that is counted."""

import math

import pytest
import torch
from transformers import DynamicCache

from attnres.bench.bank import Bank
from attnres.bench.inference import (
    ALLOWED,
    FIRST,
    NEXT,
    InferenceBench,
    InferenceRow,
    errors_at_zero_queries,
    measure,
)
from attnres.bench.machine import measured_on
from attnres.bench.models import BLOCK, FULL, PLAIN, PRENORM, ModelShape, draw_tokens, make_arms
from attnres.bench.page import tables
from attnres.bench.results import collect, prepare
from attnres.errors import ConfigError
from attnres.residual import BlockAttnRes, FullAttnRes, Residual

CPU = torch.device("cpu")
SHAPE = ModelShape(layers=6, dim=32, head_dim=16, vocab=32, blocks=3)


def bench(**changes):
    settings = {
        "shape": SHAPE, "prompt": 12, "chunks": (1, 5), "most_chunks": 2, "cached": 3, "precisions": ("float32",),
        "device": CPU, "compiled": False, "rounds": 1, "decode_rounds": 2,
    }  # fmt: skip
    return InferenceBench(**{**settings, **changes})


def residual_of(model):
    return next(module for module in model.modules() if isinstance(module, Residual))


def test_every_task_has_a_row_for_every_arm_with_what_it_was_measured_at():
    rows = list(measure(bench()))
    found = {(row.task, row.prompt, row.chunk): set() for row in rows}
    for row in rows:
        found[row.task, row.prompt, row.chunk].add(row.arm)
    arms = {PLAIN, PRENORM, BLOCK, FULL}
    assert found == {(FIRST, 12, 12): arms, (FIRST, 2, 1): arms, (FIRST, 10, 5): arms, (NEXT, 3, 1): arms}
    assert all(row.ratio_to_plain == 1 for row in rows if row.arm == PLAIN)
    assert all(row.ratio_to_prenorm == 1 for row in rows if row.arm == PRENORM)
    assert all(row.median_ms > 0 and row.error <= row.allowed and not row.note for row in rows)


def test_the_bank_is_the_sources_of_the_last_read_and_nothing_is_kept_between_chunks():
    rows = [row for row in measure(bench()) if row.task == FIRST]
    for row in rows:
        unit = row.chunk * SHAPE.dim * 4
        if row.arm == PLAIN:
            assert row.bank_bytes is row.formula_bytes is None
            continue
        assert row.bank_bytes == row.formula_bytes == {PRENORM: 1, BLOCK: 4, FULL: 13}[row.arm] * unit
        assert row.older_bytes <= {PRENORM: 2, BLOCK: 1, FULL: 0}[row.arm] * unit
        assert row.ahead_bytes == 0


def test_a_bank_that_is_kept_between_chunks_is_seen():
    model = make_arms(SHAPE, CPU)[BLOCK].eval()
    residual, bank, kept = residual_of(model), Bank(), []

    class Keep:
        def on_read(self, site, state, value):
            if site == residual.num_sublayers:
                kept.append(state)

        def on_write(self, site, state, output):
            pass

    cache, tokens = DynamicCache(config=model.config), draw_tokens(SHAPE, 1, 8, CPU)
    with torch.no_grad(), residual.listen(bank), residual.listen(Keep()):
        for chunk in tokens.split(4, dim=1):
            model(input_ids=chunk, cache=cache, use_cache=True)
    assert bank.largest == 4 * 4 * SHAPE.dim * 4
    assert bank.largest_older >= bank.largest


def test_shared_memory_counts_once_and_phase_1_on_its_own():
    residual, bank = Residual(BlockAttnRes(sublayers_per_block=3, phases="two"), 6, 8).eval(), Bank()
    whole = torch.randn(2, 5, 8)
    with torch.no_grad(), residual.listen(bank):
        state = residual.start(whole[0])
        for site in range(6):
            residual.read(state, site)
            state = residual.write(state, site, whole[1])
    unit = 5 * 8 * 4
    assert bank.largest == 2 * unit + 2 * unit  # the one piece of memory, a finished sum and a partial sum
    assert bank.largest_ahead == 3 * (unit + 5 * 4)


def test_the_gate_finds_the_wrong_arm_and_it_is_not_timed(monkeypatch):
    right = FullAttnRes._mix
    monkeypatch.setattr(FullAttnRes, "_mix", lambda *given, **options: 1.01 * right(*given, **options).roll(1, -1))
    rows = list(measure(bench()))
    (wrong,) = [row for row in rows if row.arm == FULL]
    assert wrong.note.startswith("wrong by")
    assert wrong.median_ms is None
    assert wrong.error > wrong.allowed
    assert {row.arm for row in rows if row.median_ms} == {PLAIN, PRENORM, BLOCK}


def test_the_gate_looks_at_chunks_and_at_the_next_token(monkeypatch):
    plain, right = make_arms(SHAPE, CPU)[PLAIN].eval(), BlockAttnRes._mix

    def wrong_at(tokens):
        def mix(self, state, *given, **options):
            read = right(self, state, *given, **options)
            return read if read.shape[-2] != tokens else read * float("nan")

        return mix

    with torch.no_grad():
        assert max(errors_at_zero_queries(bench(), plain).values()) <= ALLOWED["float32"]
        for tokens in (1, 5, 12):  # the next token and a chunk of 1; a chunk; the whole
            monkeypatch.setattr(BlockAttnRes, "_mix", wrong_at(tokens))
            errors = errors_at_zero_queries(bench(), plain)
            assert math.isinf(errors[BLOCK])
            assert errors[FULL] <= ALLOWED["float32"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": 0}, "prompt is 0; allowed: 1 or more"),
        ({"decode_rounds": 0}, "decode_rounds is 0"),
        ({"chunks": (3, 12)}, "a chunk is 12; allowed: 1 to 11"),
        ({"chunks": (0,)}, "a chunk is 0"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        bench(**changes)


def test_the_table_has_ratios_times_of_the_plain_model_and_the_bank(tmp_path, monkeypatch):
    path = tmp_path / "inference.csv"
    prepare(path, InferenceRow)
    collect(measure(bench(precisions=("float32", "bfloat16"))), measured_on(CPU), path)
    monkeypatch.setattr("attnres.bench.page._TABLES", {"inference": _table()})
    table = tables(tmp_path)["inference"]
    assert table.count("ratio to plain [quartiles]") == 2
    for heading in ("first token of 12 |", "first token of 2, chunks of 1", "next token", "5 of 10 tokens"):
        assert heading in table
    lines = [line for line in table.splitlines() if line.startswith("| plain")]
    assert all(line.count(" ms ") == 4 for line in lines)
    assert "| Block, float32 | 0.00586 (1.000), " in table


def _table():
    from attnres.bench.page import _TABLES

    return _TABLES["inference"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while it compiles
def test_the_compiled_next_token_is_held_against_eager_and_timed():
    rows = [row for row in measure(bench(compiled=True)) if row.compiled]
    assert {(row.arm, row.task) for row in rows} == {(arm, NEXT) for arm in (PLAIN, PRENORM, BLOCK, FULL)}
    assert all(row.error <= row.allowed and row.median_ms > 0 for row in rows)
