"""Variants that change what is a source: each read against its formula, written out."""

import math
from itertools import pairwise

import pytest
import torch

from attnres.errors import ConfigError
from attnres.residual import OUTPUT, BlockAttnRes, FullAttnRes, PreNorm, Residual, reads
from attnres.residual.state import tensors
from attnres.residual.variants.block_mhc import BlockMHC
from attnres.residual.variants.cumulative import Cumulative
from attnres.residual.variants.cut_block import CutBlock
from attnres.residual.variants.delta import DeltaAttnRes
from attnres.residual.variants.hybrid import Hybrid
from attnres.residual.variants.learned_block import LearnedBlock, boundaries
from attnres.residual.variants.rms_block import RMSBlock
from attnres.residual.variants.wav import WAV
from strategies.cases import case_id, cases
from strategies.toy import DIM, EPS, SUBLAYERS, toy

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def embedding():
    torch.manual_seed(3)
    return torch.randn(2, 3, DIM, dtype=torch.float64)


def rms(value):
    return (value.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def attend(site, sources, biases=None):
    """Depth attention by a plain loop, with something added to each score."""
    biases = biases or [0.0] * len(sources)
    query = site.pseudo_query * site.key_weight
    shares = [
        ((query * source / rms(source)).sum(-1, keepdim=True) + bias).exp()
        for source, bias in zip(sources, biases, strict=True)
    ]
    return sum(share * source for share, source in zip(shares, sources, strict=True)) / sum(shares)


def blocks_of(first, outputs, size):
    """The outputs of each finished block, and those of the running one."""
    cuts = list(range(first, SUBLAYERS, size))
    blocks = [outputs[cut : cut + size] for cut in cuts if cut < len(outputs)]
    finished = [block for cut, block in zip(cuts, blocks, strict=False) if min(cut + size, SUBLAYERS) <= len(outputs)]
    return finished, blocks[len(finished)] if len(blocks) > len(finished) else []


def check_reads(strategy, formula):
    """Compare every read with ``formula(site, index, embedding, outputs)``, which is given outputs made from it."""
    model, first = toy(strategy), embedding()
    with torch.no_grad():
        found, _ = model(first)
        outputs = []
        for index in range(SUBLAYERS + 1):
            site = model.residual.site(index if index < SUBLAYERS else OUTPUT)
            read = formula(model, site, first, outputs)
            torch.testing.assert_close(found[index], read, **EXACT)
            if index < SUBLAYERS:
                outputs.append(model.sublayer(index, read))


def of(name):
    return pytest.mark.parametrize("strategy", [each for each in cases() if each.short_name == name], ids=case_id)


@of("delta")
def test_delta_adds_a_mix_of_deltas_to_the_running_sum(strategy):
    def formula(model, site, first, outputs):
        finished, _ = blocks_of(0, outputs, strategy.sublayers_per_block)
        deltas = [first, *map(sum, finished)]
        null = site.null_score if strategy.null_score == "learned" else torch.zeros(1)
        query = site.pseudo_query * site.key_weight
        shares = [(query * delta / rms(delta)).sum(-1, keepdim=True).exp() for delta in deltas]
        total = sum(shares) + null.exp()
        return first + sum(outputs) + sum(share / total * d for share, d in zip(shares, deltas, strict=True))

    check_reads(strategy, formula)


@of("rms-block")
def test_a_finished_rms_block_is_a_sum_of_normalised_outputs(strategy):
    def formula(model, site, first, outputs):
        finished, running = blocks_of(0, outputs, strategy.sublayers_per_block)
        blocks = [sum(output / rms(output) for output in block) for block in finished]
        return attend(site, [first, *blocks, *([sum(running)] if running else [])])

    check_reads(strategy, formula)


@of("wav")
def test_wav_offers_the_differences_within_a_block(strategy):
    size = strategy.sublayers_per_block

    def details(start, block):
        places = range(start, start + len(block))
        attention = [output for place, output in zip(places, block, strict=True) if place % 2 == 0]
        mlp = [output for place, output in zip(places, block, strict=True) if place % 2 == 1]
        half = len(block) // 2
        for one, other in ((attention, mlp), (block[:half], block[half:])):
            detail = sum(one) / len(one) - sum(other) / len(other)
            yield detail * len(block) / 2  # the size of eps beside it; without eps the factor would be without effect

    def formula(model, site, first, outputs):
        finished, running = blocks_of(0, outputs, size)
        sources, biases = [first], [0.0]
        for number, block in enumerate(finished):
            total = sum(block)
            sources.append(total)
            biases.append(0.0)
            if len(block) > 1:
                sources += [detail * rms(total) / rms(detail) for detail in details(number * size, block)]
                biases += list(site.detail_bias)
        if running:
            sources.append(sum(running))
            biases.append(0.0)
        plain = sum(not isinstance(bias, torch.Tensor) for bias in biases)
        return attend(site, sources, biases) * (plain if strategy.read_scale == "sum" else 1)

    check_reads(strategy, formula)


@of("cumulative")
def test_cumulative_sources_are_running_sums(strategy):
    size = strategy.sublayers_per_block

    def formula(model, site, first, outputs):
        finished, running = blocks_of(0, outputs, size)
        stops = [0]
        for block in (*finished, *([running] if running else [])):
            stops.append(stops[-1] + len(block))
        return attend(site, [first + sum(outputs[:stop]) for stop in stops])

    check_reads(strategy, formula)


def test_cumulative_has_the_sources_it_is_named_for():
    printed = [", ".join(map(str, sources)) for sources in reads(4, Cumulative())]
    assert printed[-1] == "E, E+c0, E+c0+c1, E+c0+..+c2, E+c0+..+c3"


@of("hybrid")
def test_hybrid_is_prenorm_below_and_attnres_above(strategy):
    start = strategy.first_sublayer

    def formula(model, site, first, outputs):
        if len(outputs) < start:
            return first + sum(outputs)
        finished, running = blocks_of(start, outputs, strategy.sublayers_per_block)
        lower = first + sum(outputs[:start])
        return attend(site, [lower, *map(sum, finished), *([sum(running)] if running else [])])

    check_reads(strategy, formula)


@of("cut-block")
def test_cut_blocks_end_at_the_cuts(strategy):
    def formula(model, site, first, outputs):
        cuts = [0, *(cut for cut in strategy.boundaries if cut <= len(outputs)), len(outputs)]
        blocks = [outputs[start:stop] for start, stop in pairwise(cuts) if stop > start]
        return attend(site, [first, *map(sum, blocks)])

    check_reads(strategy, formula)


@of("learned-block")
def test_learned_blocks_fade_as_their_gates_say(strategy):
    def formula(model, site, first, outputs):
        gates = [model.residual.site(index).gate_bias.sigmoid() for index in range(SUBLAYERS - 1)]
        partials = []
        for index, output in enumerate(outputs):
            partials.append(output + (1 - gates[index - 1]) * partials[-1] if partials else output)
        biases = [0.0, *(gate.log() for gate in gates[: max(0, len(partials) - 1)]), *([0.0] if partials else [])]
        scale = sum(math.exp(bias) for bias in biases) if strategy.read_scale == "sum" else 1
        return scale * attend(site, [first, *partials], biases)

    check_reads(strategy, formula)


@of("block-mhc")
def test_a_running_block_is_read_through_its_streams(strategy):
    m, size = strategy.streams, strategy.sublayers_per_block
    start = 1 / sum(1 / (1 + math.exp(-bias)) for bias in [1.0] + [-1.0] * (m - 1))

    def maps(site, streams):
        flat = streams.flatten(-2) / rms(streams.flatten(-2))
        logits = flat @ site.maps.map_weight.T
        scales = site.maps.map_scale
        pre = 2 * (scales[0] * logits[..., :m] + site.maps.pre_bias).sigmoid()
        post = start * (scales[1] * logits[..., m : 2 * m] + site.maps.post_bias).sigmoid()
        matrix = (scales[2] * logits[..., 2 * m :] + site.maps.res_bias).exp().unflatten(-1, (m, m))
        for _ in range(strategy.sinkhorn_iterations):
            matrix = matrix / matrix.sum(-1, keepdim=True)
            matrix = matrix / matrix.sum(-2, keepdim=True)
        return pre, post, matrix

    def streams_of(model, start_at, block):
        streams = model.residual.site(start_at).post_bias.sigmoid()[:, None] * start * block[0][..., None, :]
        for index, output in enumerate(block[1:], start_at + 1):
            _, post, matrix = maps(model.residual.site(index), streams)
            streams = torch.einsum("...ij,...id->...jd", matrix, streams) + post[..., None] * output[..., None, :]
        return streams

    def formula(model, site, first, outputs):
        finished, running = blocks_of(0, outputs, size)
        sources = [first, *(streams_of(model, n * size, block).sum(-2) for n, block in enumerate(finished))]
        if running:
            streams = streams_of(model, len(finished) * size, running)
            sources.append((maps(site, streams)[0][..., None] * streams).sum(-2))
        return attend(site, sources)

    check_reads(strategy, formula)


@pytest.mark.parametrize(
    ("strategy", "plain"),
    [
        (CutBlock(boundaries=(3, 6)), BlockAttnRes(sublayers_per_block=3)),
        (CutBlock(), BlockAttnRes(num_blocks=1)),
        (LearnedBlock(read_scale="sum"), PreNorm()),
        (LearnedBlock(read_scale="sum", start_gate=0.9), PreNorm()),
        (Hybrid(read_scale="sum"), PreNorm()),
        (Hybrid(read_scale="sum", first_sublayer=3, sublayers_per_block=2), PreNorm()),
        (Hybrid(first_sublayer=0), FullAttnRes()),
        (BlockMHC(), BlockAttnRes(sublayers_per_block=4)),
        (BlockMHC(read_scale="sum", streams=3), PreNorm()),
        (WAV(bias=-40.0), BlockAttnRes(sublayers_per_block=4)),
        (WAV(bias=-40.0, read_scale="sum"), PreNorm()),
        (RMSBlock(sublayers_per_block=20), BlockAttnRes(num_blocks=1)),
    ],
    ids=lambda strategy: strategy.label,
)
def test_start(strategy, plain):
    """Reads as they are made at the start, but for the output read of the last, whose block is finished there."""
    mine, theirs = toy(strategy, scramble=0), toy(plain, scramble=0)
    count = SUBLAYERS if isinstance(strategy, RMSBlock) else SUBLAYERS + 1
    for one, other in zip(mine(embedding())[0][:count], theirs(embedding())[0][:count], strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("read_scale", ["mean", "sum"])
@pytest.mark.parametrize("cuts", [(), (1,), (3, 5), (1, 2, 3, 4, 5, 6, 7)], ids=str)
def test_learned_blocks_with_hard_gates_are_cut_blocks(cuts, read_scale):
    soft, hard = toy(LearnedBlock(read_scale=read_scale)), toy(CutBlock(boundaries=cuts, read_scale=read_scale))
    hard.load_state_dict({name: value for name, value in soft.state_dict().items() if "gate_bias" not in name})
    with torch.no_grad():
        for index in range(SUBLAYERS - 1):
            soft.residual.site(index).gate_bias.fill_(60.0 if index + 1 in cuts else -60.0)
        assert boundaries(soft.residual) == cuts
        for one, other in zip(soft(embedding())[0], hard(embedding())[0], strict=True):
            torch.testing.assert_close(one, other, **EXACT)


def test_gates_get_gradients_from_the_start():
    model = toy(LearnedBlock(), scramble=0)
    model(embedding())[0][-1].pow(2).sum().backward()
    gates = [model.residual.site(index).gate_bias.grad for index in range(SUBLAYERS - 1)]
    assert all(gate is not None and gate.abs() > 0 for gate in gates[:-2])


@pytest.mark.parametrize(
    "strategy",
    [
        CutBlock(boundaries=(2, 5, 9)),
        RMSBlock(sublayers_per_block=3),
        RMSBlock(sublayers_per_block=1),
        Cumulative(),
        Cumulative(sublayers_per_block=4),
        Hybrid(first_sublayer=2),
        Hybrid(first_sublayer=3, sublayers_per_block=3),
    ],
    ids=case_id,
)
def test_two_phases_are_one_phase(strategy):
    reads_, gradients, ahead = [], [], []
    for phases in ("one", "two"):
        model = toy(type(strategy)(**{**vars(strategy), "phases": phases}), sublayers=12)
        first = embedding().requires_grad_()
        found, _ = model(first)
        ahead.append(any(getattr(site, "upcoming", ()) for site in model.residual.sites))
        reads_.append(torch.stack(found))
        found[-1].pow(2).sum().backward()
        gradients.append([first.grad, *(parameter.grad for parameter in model.parameters())])
    assert ahead == [False, True]
    torch.testing.assert_close(*reads_, **EXACT)
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, **EXACT)


@pytest.mark.parametrize("strategy", cases(), ids=case_id)
def test_a_state_never_holds_a_parameter_itself(strategy):
    """A reentrant checkpoint would make what it returns its own result, and a parameter no longer a leaf."""
    model = toy(strategy)
    state = model.residual.start(embedding())
    for index in range(SUBLAYERS):
        read = model.residual.read(state, index)
        state = model.residual.write(state, index, model.sublayer(index, read))
        assert not any(isinstance(tensor, torch.nn.Parameter) for tensor in tensors(state))


def test_details_sum_to_zero_where_outputs_are_equal_and_have_the_size_of_their_block():
    residual = Residual(WAV(sublayers_per_block=3), 6, DIM, eps=1e-12)
    state = residual.start(torch.randn(4, DIM))
    same = torch.randn(4, DIM)
    for index in range(3):
        state = residual.write(state, index, same)
    assert all(detail.abs().max() < 1e-5 for detail in state.finished[2:])
    for index in range(3, 6):
        state = residual.write(state, index, torch.randn(4, DIM))
    total, *details = state.finished[-3:]
    for detail in details:
        torch.testing.assert_close(detail.pow(2).mean(-1), total.pow(2).mean(-1))


def test_an_output_is_loud_until_its_rms_block_is_finished():
    residual = Residual(RMSBlock(sublayers_per_block=2), 4, DIM)
    start = residual.start(torch.randn(3, DIM))
    output = torch.randn(3, DIM)
    states = [residual.write(start, 0, factor * output) for factor in (1, 100)]
    assert (residual.read(states[1], 1) - residual.read(states[0], 1)).abs().max() > 1
    finished = [residual.write(state, 1, output).finished[-1] for state in states]
    torch.testing.assert_close(*finished, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeltaAttnRes(null_score="none"), "null_score is 'none'"),
        (lambda: RMSBlock(sublayers_per_block=0), "sublayers_per_block is 0"),
        (lambda: WAV(sublayers_per_block=1), "sublayers_per_block is 1; allowed is 2 or more"),
        (lambda: CutBlock(boundaries=(3, 2)), "boundaries is .3, 2.; allowed are whole numbers of 1 or more that rise"),
        (lambda: CutBlock(boundaries=(2, 2)), "that rise"),
        (lambda: CutBlock(boundaries=(0, 2)), "that rise"),
        (lambda: CutBlock(boundaries=(1.0,)), "whole numbers"),
        (lambda: Residual(CutBlock(boundaries=(2, 4)), 4, DIM), "below 4 .the number of sublayers"),
        (lambda: LearnedBlock(start_gate=1.0), "start_gate is 1.0"),
        (lambda: boundaries(Residual(CutBlock(), 4, DIM)), "allowed is LearnedBlock"),
        (lambda: Hybrid(first_sublayer=-1), "first_sublayer is -1"),
        (lambda: Residual(Hybrid(first_sublayer=4), 4, DIM), "first_sublayer is 4; allowed is below 4"),
        (lambda: BlockMHC(streams=0), "streams is 0"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
