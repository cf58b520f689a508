import copy

import pytest
import torch
from torch import nn

from attnres.errors import ConfigError, ShapeError
from attnres.ops import depth_attention
from attnres.residual import OUTPUT, BlockAttnRes, FullAttnRes, History, PreNorm, Residual, reads

STRATEGIES = [PreNorm(), FullAttnRes(), *(BlockAttnRes(sublayers_per_block=s) for s in (1, 2, 3, 8))]


def run(residual, embedding, sublayers):
    """The one loop of the project, written out."""
    state = residual.start(embedding)
    for site, sublayer in enumerate(sublayers):
        state = residual.write(state, site, sublayer(residual.read(state, site)))
    return residual.read(state, OUTPUT), state


def randomise(residual):
    for name, parameter in residual.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if name.endswith("key_weight") else 0.0, std=0.5)


def sources_of(state):
    return state.sources if isinstance(state, History) else (state.hidden,)


class Recorder:
    def __init__(self):
        self.read, self.written, self.snapshots = [], [], []

    def on_read(self, site, state, value):
        self.read.append((site, state, value))
        self.snapshots.append([source.detach().clone() for source in sources_of(state)])

    def on_write(self, site, state, output):
        self.written.append((site, output))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("num_sublayers", [1, 5, 6])
def test_the_ledger_shows_the_printed_schedule(strategy, num_sublayers):
    residual = Residual(strategy, num_sublayers, num_sublayers + 1)
    randomise(residual)
    unit = torch.eye(num_sublayers + 1)
    recorder = Recorder()
    with residual.listen(recorder):
        run(residual, unit[-1:], [lambda _, row=row: unit[row : row + 1] for row in range(num_sublayers)])
    assert [site for site, _, _ in recorder.read] == list(range(num_sublayers + 1))
    for (_, state, _), sources in zip(recorder.read, reads(num_sublayers, strategy), strict=True):
        seen = sources_of(state)
        expected = [unit[s.first : s.stop].sum(0, keepdim=True) + s.embedding * unit[-1:] for s in sources]
        assert len(seen) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES[1:], ids=str)
def test_a_read_is_depth_attention_with_the_sites_own_query_and_key_weight(strategy):
    residual = Residual(strategy, 6, 8, eps=1e-3)
    randomise(residual)
    recorder = Recorder()
    with residual.listen(recorder):
        run(residual, torch.randn(3, 8), [nn.Linear(8, 8) for _ in range(6)])
    for site, state, value in recorder.read:
        parameters = residual.sites[site]
        expected = depth_attention(state.sources, parameters.pseudo_query, parameters.key_weight, eps=1e-3)
        assert torch.equal(value, expected)


def test_the_output_read_has_a_query_and_key_weight_of_its_own():
    residual = Residual(FullAttnRes(), 3, 4)
    assert len(residual.sites) == 4
    assert len({id(p) for p in residual.parameters()}) == 8
    before, _ = run(residual, torch.ones(1, 4), [nn.Identity()] * 3)
    with torch.no_grad():
        residual.sites[OUTPUT].pseudo_query.fill_(1.0)
    _, state = run(residual, torch.ones(1, 4), [lambda x: -x] * 3)
    assert not torch.equal(residual.read(state, OUTPUT), before)


@pytest.mark.parametrize("num_sublayers", [1, 2, 7])
def test_silent_sublayers_leave_the_embedding_over_the_number_of_sources(num_sublayers):
    embedding = torch.randn(2, 4)
    hidden, _ = run(Residual(FullAttnRes(), num_sublayers, 4), embedding, [torch.zeros_like] * num_sublayers)
    torch.testing.assert_close(hidden, embedding / (num_sublayers + 1))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_nothing_in_a_state_changes_after_it_was_made(strategy):
    residual = Residual(strategy, 12, 8)
    randomise(residual)
    recorder = Recorder()
    with residual.listen(recorder):
        run(residual, torch.randn(3, 8), [torch.tanh] * 12)
    assert len(recorder.read) == 13
    for (_, state, _), snapshot in zip(recorder.read, recorder.snapshots, strict=True):
        assert all(torch.equal(now, then) for now, then in zip(sources_of(state), snapshot, strict=True))


def test_a_finished_source_is_handed_on_and_not_copied():
    residual = Residual(BlockAttnRes(sublayers_per_block=2), 4, 8)
    first = residual.start(torch.randn(3, 8))
    state = first
    for site in range(4):
        state = residual.write(state, site, torch.randn(3, 8))
    assert state.finished[0] is first.finished[0]
    assert state.partial is None


def test_sum_scale_at_zero_queries_is_the_residual_sum():
    embedding, sublayers = torch.randn(5, 8), [nn.Linear(8, 8) for _ in range(7)]
    reference, _ = run(Residual(PreNorm(), 7, 8), embedding, sublayers)
    for strategy in (FullAttnRes(read_scale="sum"), BlockAttnRes(sublayers_per_block=3, read_scale="sum")):
        hidden, _ = run(Residual(strategy, 7, 8), embedding, sublayers)
        torch.testing.assert_close(hidden, reference, rtol=1e-5, atol=1e-6)


def test_depth_weights_reconstruct_the_read():
    for strategy in (PreNorm(), FullAttnRes(), BlockAttnRes(sublayers_per_block=2, read_scale="sum")):
        residual = Residual(strategy, 5, 8)
        randomise(residual)
        recorder = Recorder()
        with residual.listen(recorder):
            run(residual, torch.randn(3, 8), [torch.tanh] * 5)
        for site, state, value in recorder.read:
            weights = residual.depth_weights(state, site)
            sources = sources_of(state)
            assert weights.shape == (3, len(sources))
            torch.testing.assert_close(sum(weights[:, i, None] * v for i, v in enumerate(sources)), value)


def zero_queries_and_unit_key_weights(residual):
    return all(
        bool((parameter == (1 if name.endswith("key_weight") else 0)).all())
        for name, parameter in residual.named_parameters()
    )


def test_initial_values_are_exact_after_every_way_of_building():
    residual = Residual(BlockAttnRes(sublayers_per_block=2), 4, 8)
    assert zero_queries_and_unit_key_weights(residual)
    randomise(residual)
    assert not zero_queries_and_unit_key_weights(residual)
    residual.reset_parameters()
    assert zero_queries_and_unit_key_weights(residual)
    with torch.device("meta"):
        residual = Residual(FullAttnRes(), 4, 8)
    assert next(residual.parameters()).is_meta
    torch.full((1000, 8), 7.0)  # so that fresh memory is not zero by chance
    assert zero_queries_and_unit_key_weights(residual.to_empty(device="cpu"))


def test_moving_a_trained_residual_keeps_its_values():
    residual = Residual(FullAttnRes(), 2, 8)
    randomise(residual)
    before = copy.deepcopy(residual.state_dict())
    residual.to(torch.float64).to("cpu")
    assert all(torch.equal(value, before[name].double()) for name, value in residual.state_dict().items())


def test_under_autocast_reads_have_the_autocast_dtype_and_gradients_their_own():
    residual = Residual(BlockAttnRes(sublayers_per_block=2), 3, 8)
    embedding = torch.randn(2, 8, requires_grad=True)
    recorder = Recorder()
    with torch.autocast("cpu", dtype=torch.bfloat16), residual.listen(recorder):
        hidden, _ = run(residual, embedding, [nn.Linear(8, 8) for _ in range(3)])
    assert {value.dtype for _, _, value in recorder.read} == {torch.bfloat16}
    (grad,) = torch.autograd.grad(hidden.float().sum(), embedding)
    assert grad.dtype == torch.float32


def test_without_autocast_mixed_dtypes_are_refused():
    residual = Residual(FullAttnRes(), 2, 8)
    state = residual.write(residual.start(torch.randn(2, 8)), 0, torch.randn(2, 8).bfloat16())
    with pytest.raises(ShapeError, match="different dtypes"):
        residual.read(state, 1)


def test_gradients_through_every_read_equal_finite_differences():
    residual = Residual(FullAttnRes(), 4, 5, dtype=torch.float64)
    randomise(residual)
    sublayers = [nn.Linear(5, 5, dtype=torch.float64) for _ in range(4)]
    embedding = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: run(residual, x, sublayers)[0], embedding)


def test_a_listener_is_gone_after_its_block():
    residual, recorder = Residual(FullAttnRes(), 1, 4), Recorder()
    with pytest.raises(RuntimeError, match="stop"), residual.listen(recorder):
        raise RuntimeError("stop")
    run(residual, torch.randn(1, 4), [torch.tanh])
    assert recorder.read == []


@pytest.mark.parametrize("arguments", [(0, 4), (4, 0)], ids=str)
def test_a_residual_without_depth_or_width_is_refused(arguments):
    with pytest.raises(ConfigError, match="is 0; allowed is 1 or more"):
        Residual(FullAttnRes(), *arguments)
