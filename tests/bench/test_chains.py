"""Chains of reads and whole models: the arms compute what they stand for, and wrong ones are reported."""

import pytest
import torch

from attnres.bench import phases as phases_module
from attnres.bench.chain import Chain, ChainInputs
from attnres.bench.figure import draw_depth
from attnres.bench.models import BLOCK, FULL, PLAIN, PRENORM, ModelShape, check_arms, draw_tokens, make_arms
from attnres.bench.overhead import OverheadBench
from attnres.bench.overhead import measure as measure_overhead
from attnres.bench.phases import AUTO, ONE, TWO, PhaseBench, PhaseRow, measure
from attnres.errors import ConfigError
from attnres.residual import BlockAttnRes, FullAttnRes, PreNorm
from bench.test_results import MACHINE

CPU = torch.device("cpu")


def test_a_chain_of_plain_sums_is_what_can_be_worked_out_by_hand():
    inputs = ChainInputs.draw(3, 5, 8, torch.float64, CPU)
    chain = Chain(PreNorm(), inputs)
    found = chain.everything()
    embedding, (a, b, c), grad = inputs.embedding.detach(), inputs.outputs, inputs.grad
    expected = [embedding, embedding + a, embedding + a + b, embedding + a + b + c]
    # the last output has the gradient of one read, the first that of three; the embedding that of all four
    expected += [grad, 2 * grad, 3 * grad, 4 * grad]
    assert len(found) == len(expected)
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true)
    torch.testing.assert_close(chain.forward(), expected[3])
    torch.testing.assert_close(chain.forward_backward()[0], 4 * grad)


def test_gradients_of_a_chain_are_those_of_leaves():
    """The sublayers hand on gradients as if their outputs were leaves and every read had a loss of its own."""
    inputs = ChainInputs.draw(4, 3, 8, torch.float64, CPU)
    chain = Chain(BlockAttnRes(num_blocks=2), inputs)
    found = chain.everything()
    leaves = [output.clone().requires_grad_() for output in inputs.outputs]
    state, reads = chain.residual.start(inputs.embedding), []
    for site, output in enumerate(leaves):
        reads.append(chain.residual.read(state, site))
        state = chain.residual.write(state, site, output)
    reads.append(chain.residual.read(state, -1))
    wanted = [*reversed(leaves), inputs.embedding, *chain.residual.parameters()]
    grads = torch.autograd.grad(reads, wanted, [inputs.grad] * 5)
    for mine, true in zip(found, [*reads, *grads], strict=True):
        torch.testing.assert_close(mine, true.detach())


def bench(**changes):
    settings = {
        "sublayers": (8,),
        "blocks": 4,
        "tokens": 4,
        "dim": 16,
        "dtype": torch.float32,
        "device": CPU,
        "rounds": 2,
    }
    return PhaseBench(**{**settings, **changes})


def test_every_arm_is_checked_and_timed_in_both_directions():
    rows = list(measure(bench(sublayers=(4, 8))))
    arms = {row.arm for row in rows}
    assert {ONE, TWO, AUTO} < arms
    assert len(rows) == 2 * 2 * len(arms)
    assert all(row.note == "" and row.rounds == 2 and row.median_ms > 0 for row in rows)
    assert all(row.ratio_to_one_phase == 1 for row in rows if row.arm == ONE)


def test_full_is_left_out_where_it_would_take_too_long(monkeypatch):
    monkeypatch.setattr(phases_module, "DEEPEST_FULL", 4)
    assert FULL in bench().arms(4)
    assert FULL not in bench().arms(8)


def test_a_wrong_arm_is_reported_and_not_timed(monkeypatch):
    arms = PhaseBench.arms
    wrong = {TWO: BlockAttnRes(num_blocks=2)}
    monkeypatch.setattr(PhaseBench, "arms", lambda self, sublayers: {**arms(self, sublayers), **wrong})
    rows = list(measure(bench()))
    assert [row.direction for row in rows if row.arm == TWO] == ["gate"]
    assert rows[0].note.startswith("wrong by")
    assert [row.direction for row in rows if row.arm == ONE] == ["forward", "forward+backward"]


def test_bad_depths_are_refused():
    with pytest.raises(ConfigError, match="num_blocks is 4"):
        bench(sublayers=(2,))
    with pytest.raises(ConfigError, match="tokens is 0"):
        bench(tokens=0)


def test_the_figure_is_the_same_file_every_time(tmp_path):
    rows = [
        PhaseRow(arm=arm, direction=direction, sublayers=depth, blocks=4, tokens=4, dim=16, dtype="float32",
                 median_ms=depth * cost, low_ms=depth * cost * 0.9, high_ms=depth * cost * 1.1, rounds=3)
        for arm, cost in ((ONE, 2.0), (TWO, 1.0))
        for direction in ("forward", "forward+backward")
        for depth in (8, 16)
    ]  # fmt: skip
    for name in ("a", "b"):
        draw_depth(rows, MACHINE, tmp_path / "new" / f"{name}.svg")
    first, second = ((tmp_path / "new" / f"{name}.svg").read_text() for name in ("a", "b"))
    assert first == second
    assert all(word in first for word in ("sublayers", ONE, TWO, "4 blocks, 4 tokens x 16"))


SHAPE = ModelShape(layers=2, dim=32, head_dim=16, vocab=32, blocks=2)


def test_all_arms_share_their_base_weights_and_have_queries_that_are_not_zero():
    arms = make_arms(SHAPE, CPU)
    assert list(arms) == [PLAIN, PRENORM, BLOCK, FULL]
    plain = dict(arms[PLAIN].named_parameters())
    for model in arms.values():
        own = dict(model.named_parameters())
        for name, weight in plain.items():
            assert own[name].data_ptr() == weight.data_ptr()
            assert own[name].requires_grad
        assert all(own[name].abs().min() > 0 for name in own if "pseudo_query" in name)
    tokens = draw_tokens(SHAPE, 2, 8, CPU)
    losses = {name: model(input_ids=tokens, labels=tokens).loss.item() for name, model in arms.items()}
    assert losses[PLAIN] == pytest.approx(losses[PRENORM])
    assert losses[BLOCK] != pytest.approx(losses[PLAIN])


def test_models_that_are_not_the_plain_one_at_zero_queries_are_named(monkeypatch):
    arms, tokens = make_arms(SHAPE, CPU), draw_tokens(SHAPE, 2, 8, CPU)
    assert check_arms(SHAPE, arms[PLAIN], tokens, allowed=1e-3) == {}
    right = FullAttnRes.read
    monkeypatch.setattr(FullAttnRes, "read", lambda self, state, site: right(self, state, site).roll(1, -1))
    wrong = check_arms(SHAPE, arms[PLAIN], tokens, allowed=1e-3)
    assert list(wrong) == [FULL]
    assert wrong[FULL].startswith("wrong by")


def test_a_wrong_model_is_reported_and_not_timed(monkeypatch):
    monkeypatch.setattr("attnres.bench.overhead.check_arms", lambda *_, **__: {BLOCK: "wrong by 1 at zero queries"})
    settings = OverheadBench(
        shape=SHAPE, batch=1, context=4, prompt=4, cached=2, precisions=("float32",), device=CPU, rounds=1,
        decode_rounds=1, optimizer=True,
    )  # fmt: skip
    rows = list(measure_overhead(settings))
    assert [row.median_ms is None for row in rows if row.arm == BLOCK] == [True, False, False]
    assert {(row.task, row.optimizer) for row in rows} == {
        ("training step", True),
        ("prefill", False),
        ("decode", False),
    }
    assert all(row.ratio_to_plain == 1 for row in rows if row.arm == PLAIN)
    assert all(row.ratio_to_prenorm == 1 for row in rows if row.arm == PRENORM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"dim": 40}, "a multiple of head_dim"), ({"layers": 0}, "layers is 0"), ({"blocks": 5}, "num_blocks is 5")],
)
def test_bad_model_sizes_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelShape(**{**vars(SHAPE), **changes})
