"""Full, Block, the paper's ablations and DenseFormer: each read against its formula, and against fla-core."""

import pytest
import torch

from attnres.errors import ConfigError
from attnres.models import build
from attnres.residual import OUTPUT, BlockAttnRes, FullAttnRes, PreNorm
from attnres.residual.rivals.denseformer import DenseFormer
from attnres.residual.variants.cut_block import CutBlock
from attnres.residual.variants.input_dependent import InputDependentQuery
from attnres.residual.variants.input_independent import InputIndependentMixing
from attnres.residual.variants.multi_head import MultiHeadAttnRes
from attnres.residual.variants.no_key_norm import NoKeyNorm
from attnres.residual.variants.sigmoid import SigmoidAttnRes
from attnres.residual.variants.wav import WAV
from attnres.residual.variants.window import SlidingWindow
from models.small import llama
from peers import fla_naive
from strategies.cases import case_id, cases
from strategies.toy import DIM, EPS, SUBLAYERS, Toy, toy

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def of(name):
    return [strategy for strategy in cases() if strategy.short_name == name]


def embedding():
    return torch.randn(2, 3, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def norm(value):
    return value / (value.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def sources_of(first, outputs, size):
    """The embedding, and sums of each run of ``size`` outputs, the last one as far as it goes."""
    return [first, *(sum(outputs[at : at + size]) for at in range(0, len(outputs), size))]


def size_of(strategy):
    return getattr(strategy, "sublayers_per_block", None) or 1


def check_reads(strategy, formula):
    """Compare every read with ``formula(site, sources, last read)``; the next outputs are made of what it says."""
    model, first = toy(strategy), embedding()
    with torch.no_grad():
        reads, _ = model(first)
        outputs, last = [], None
        for index in range(SUBLAYERS + 1):
            site = model.residual.site(index if index < SUBLAYERS else OUTPUT)
            last = formula(site, sources_of(first, outputs, size_of(strategy)), last)
            torch.testing.assert_close(reads[index], last, **EXACT)
            if index < SUBLAYERS:
                outputs.append(model.sublayer(index, last))


def attend(sources, scores):
    total = sum(score.exp() for score in scores)
    return sum(score.exp() / total * source for score, source in zip(scores, sources, strict=True))


@pytest.mark.parametrize("strategy", of("full") + of("block"), ids=case_id)
def test_full_and_block_are_their_formula(strategy):
    def formula(site, sources, last):
        query = site.pseudo_query * site.key_weight
        return attend(sources, [(norm(source) * query).sum(-1, keepdim=True) for source in sources])

    check_reads(strategy, formula)


@pytest.mark.parametrize("strategy", [FullAttnRes(), BlockAttnRes(sublayers_per_block=3)], ids=case_id)
def test_full_and_block_read_what_fla_core_reads(strategy):
    model, first = toy(strategy, dtype=torch.float32), embedding().float()
    with torch.no_grad():
        reads, outputs = model(first)
        for index, read in enumerate(reads):
            site = model.residual.site(index if index < SUBLAYERS else OUTPUT)
            sources = sources_of(first, outputs[:index], size_of(strategy))
            theirs = fla_naive().naive_attnres(site.pseudo_query, sources, site.key_weight, rms_eps=EPS)
            torch.testing.assert_close(read, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", of("input-dependent"), ids=case_id)
def test_an_input_dependent_query_is_a_projection_of_the_hidden_state(strategy):
    def formula(site, sources, last):
        hidden = sources[-1] if strategy.query_from == "output" or last is None else last
        hidden = norm(hidden) if strategy.norm_query else hidden
        query = torch.einsum("...d,ed->...e", hidden, site.query_weight) * site.key_weight
        return attend(sources, [(norm(source) * query).sum(-1, keepdim=True) for source in sources])

    check_reads(strategy, formula)


@pytest.mark.parametrize("strategy", of("input-independent"), ids=case_id)
def test_input_independent_mixing_has_the_same_scalars_for_every_token(strategy):
    def formula(site, sources, last):
        scalars = site.source_weight
        weights = scalars.exp() / scalars.exp().sum() if strategy.normalization == "softmax" else scalars
        assert len(weights) == len(sources)
        return sum(weight * source for weight, source in zip(weights, sources, strict=True))

    check_reads(strategy, formula)


@pytest.mark.parametrize("strategy", of("sigmoid"), ids=case_id)
def test_sigmoids_do_not_compete(strategy):
    def formula(site, sources, last):
        query = site.pseudo_query * site.key_weight
        weights = [1 / (1 + (-(norm(source) * query).sum(-1, keepdim=True)).exp()) for source in sources]
        mixed = sum(weight * source for weight, source in zip(weights, sources, strict=True))
        return mixed / sum(weights) if strategy.renormalize else mixed

    check_reads(strategy, formula)


@pytest.mark.parametrize("strategy", of("no-key-norm"), ids=case_id)
def test_without_key_norm_the_score_is_the_dot_product(strategy):
    def formula(site, sources, last):
        return attend(sources, [(source * site.pseudo_query).sum(-1, keepdim=True) for source in sources])

    check_reads(strategy, formula)


@pytest.mark.parametrize("strategy", of("window"), ids=case_id)
def test_a_window_sees_the_embedding_and_the_newest_outputs(strategy):
    def formula(site, sources, last):
        seen = [sources[0], *sources[1:][-strategy.window :]]
        query = site.pseudo_query * site.key_weight
        return attend(seen, [(norm(source) * query).sum(-1, keepdim=True) for source in seen])

    check_reads(strategy, formula)


def test_the_state_of_a_window_does_not_grow():
    model = toy(SlidingWindow(window=3))
    state = model.residual.start(embedding())
    for index in range(SUBLAYERS):
        state = model.residual.write(state, index, embedding())
        assert len(state.finished) == min(index + 2, 4)


@pytest.mark.parametrize("strategy", of("multi-head"), ids=case_id)
def test_each_head_attends_over_its_own_channels(strategy):
    width = DIM // strategy.heads

    def formula(site, sources, last):
        parts = []
        for head in range(strategy.heads):
            mine = slice(head * width, (head + 1) * width)
            keys = [
                norm(source[..., mine]) if strategy.norm_per_head else norm(source)[..., mine] for source in sources
            ]
            query = site.pseudo_query[mine] * site.key_weight[mine]
            scores = [(key * query).sum(-1, keepdim=True) for key in keys]
            parts.append(attend([source[..., mine] for source in sources], scores))
        return torch.cat(parts, -1)

    check_reads(strategy, formula)


def test_one_head_is_full_attention_residuals():
    heads, full = toy(MultiHeadAttnRes(heads=1)), toy(FullAttnRes())
    for ours, theirs in zip(heads(embedding())[0], full(embedding())[0], strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("strategy", of("denseformer"), ids=case_id)
def test_denseformer_averages_the_states_after_each_layer(strategy):
    model, first = toy(strategy), embedding()
    with torch.no_grad():
        reads, _ = model(first)
        states, hidden = [first], first
        for index in range(SUBLAYERS):
            torch.testing.assert_close(reads[index], hidden, **EXACT)
            hidden = hidden + model.sublayer(index, hidden)
            if (index + 1) % strategy.sublayers_per_average == 0:
                states.append(hidden)
                weights = model.residual.site(index).state_weight
                hidden = sum(weight * state for weight, state in zip(weights, states, strict=True))
        torch.testing.assert_close(reads[-1], hidden, **EXACT)


@pytest.mark.parametrize("read_scale", ["mean", "sum"])
@pytest.mark.parametrize(
    "strategy",
    [
        FullAttnRes, InputDependentQuery, InputIndependentMixing, SigmoidAttnRes, NoKeyNorm, MultiHeadAttnRes,
    ],
)  # fmt: skip
def test_the_ablations_start_in_the_direction_of_the_residual_sum(strategy, read_scale):
    model = toy(strategy(read_scale=read_scale), scramble=0.0)
    reads, outputs = model(embedding())
    for index, read in enumerate(reads):
        total = sum(outputs[:index], embedding())
        if read_scale == "sum":
            torch.testing.assert_close(read, total, **EXACT)
        ratio = read / total
        torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio), **EXACT)


def test_denseformer_starts_as_prenorm():
    config, ids = llama(), torch.randint(3, 96, (2, 7))
    models = []
    for strategy in (DenseFormer(), PreNorm()):
        torch.manual_seed(0)
        models.append(build(config, strategy))
    assert torch.equal(models[0](ids).logits, models[1](ids).logits)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InputDependentQuery(query_from="x"), "query_from is 'x'"),
        (lambda: InputIndependentMixing(normalization="l1"), "normalization is 'l1'"),
        (lambda: SlidingWindow(window=0), "window is 0"),
        (lambda: SlidingWindow(window=2.0), "window is 2.0; allowed is a whole number"),
        (lambda: SigmoidAttnRes(renormalize="false"), "renormalize is 'false'; allowed is true or false"),
        (lambda: WAV(bias=float("nan")), "bias is nan; allowed is a finite number"),
        (lambda: WAV(bias="-4"), "bias is '-4'; allowed is a finite number"),
        (lambda: CutBlock(boundaries=(2, True)), "allowed are whole numbers"),
        (lambda: toy(DenseFormer(sublayers_per_average=9)), "sublayers_per_average is 9; allowed is up to 8"),
        (lambda: SlidingWindow(window=True), "window is True"),
        (lambda: MultiHeadAttnRes(heads=0), "heads is 0"),
        (lambda: toy(MultiHeadAttnRes(heads=3)), "heads is 3; allowed is a divisor of the width, which is 8"),
        (lambda: NoKeyNorm(sublayers_per_block=0), "sublayers_per_block is 0"),
        (lambda: SigmoidAttnRes(read_scale="max"), "read_scale is 'max'"),
        (lambda: DenseFormer(sublayers_per_average=0), "sublayers_per_average is 0"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_boundaries_may_be_a_list_as_json_has_them():
    assert CutBlock(boundaries=[2, 5]) == CutBlock(boundaries=(2, 5))
    hash(CutBlock(boundaries=[2, 5]))


def test_denseformer_averages_in_float32_and_rounds_once():
    model = toy(DenseFormer(sublayers_per_average=1), dtype=torch.bfloat16, scramble=0.3)
    state = model.residual.start(embedding().bfloat16())
    with torch.no_grad():
        for index in range(SUBLAYERS):
            state = model.residual.write(state, index, embedding().bfloat16())
            weights = model.residual.site(index).state_weight.double()
            exact = sum(weight * state_.double() for weight, state_ in zip(weights, state.finished, strict=True))
            assert ((state.hidden.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-4).all()


@pytest.mark.parametrize("strategy", cases(), ids=case_id)
def test_a_read_has_the_same_bits_with_and_without_gradients(strategy):
    model, first = toy(strategy, dtype=torch.float32), embedding().float()
    with torch.no_grad():
        expected, _ = model(first)
    for ours, theirs in zip(model(first)[0], expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("strategy", cases(), ids=case_id)
def test_resetting_every_module_gives_the_values_it_was_made_with(strategy):
    torch.manual_seed(0)
    model = Toy(strategy)
    expected = {name: value.clone() for name, value in model.residual.state_dict().items()}
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.fill_(float("nan"))
    for module in model.residual.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, value in model.residual.state_dict().items():
        assert torch.equal(value, expected[name]), name
