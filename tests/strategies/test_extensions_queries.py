"""Variants that change how sources are scored: each read against its formula, written out."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers.models.inkling2.modeling_inkling2 import Inkling2BlockAttentionResidual

from attnres.errors import ConfigError
from attnres.models import build
from attnres.residual import OUTPUT, BlockAttnRes, FullAttnRes, PreNorm, Residual
from attnres.residual.variants import block_lagged
from attnres.residual.variants.block_lagged import BlockLaggedQuery
from attnres.residual.variants.gated import GatedAttnRes
from attnres.residual.variants.inkling2 import Inkling2
from attnres.residual.variants.low_rank_query import LowRankQuery, LowRankQuerySite
from attnres.residual.variants.sliced_key import SlicedKey
from attnres.residual.variants.top_k import TopK
from models.small import llama
from strategies.cases import case_id, cases
from strategies.toy import DIM, EPS, SUBLAYERS, toy

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def embedding():
    torch.manual_seed(3)
    return torch.randn(2, 3, DIM, dtype=torch.float64)


def norm(value):
    return value / (value.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def softmax(scores):
    """Weights of a list of scores, each of one number a token."""
    total = sum(score.exp() for score in scores)
    return [(score.exp() / total)[..., None] for score in scores]


def sources_of(first, outputs, size):
    """The embedding, the sums of finished blocks, and the sum of the running one; and whether there is one."""
    whole = len(outputs) // size
    if len(outputs) == SUBLAYERS:
        whole = -(-SUBLAYERS // size)
    blocks = [sum(outputs[size * block : size * (block + 1)]) for block in range(whole)]
    rest = outputs[size * whole :]
    return [first, *blocks, *([sum(rest)] if rest else [])], bool(rest)


def check_reads(strategy, formula):
    """Compare every read with ``formula(site, sources, has_partial, outputs)``, which is given outputs made from it."""
    model, first = toy(strategy), embedding()
    with torch.no_grad():
        reads, _ = model(first)
        outputs, last = [], None
        for index in range(SUBLAYERS + 1):
            sources, running = sources_of(first, outputs, strategy.sublayers_per_block)
            site = model.residual.site(index if index < SUBLAYERS else OUTPUT)
            last = formula(site, sources, running, outputs, last)
            torch.testing.assert_close(reads[index], last, **EXACT)
            if index < SUBLAYERS:
                outputs.append(model.sublayer(index, last))


def of(name):
    return pytest.mark.parametrize("strategy", [each for each in cases() if each.short_name == name], ids=case_id)


def attend(query, sources):
    weights = softmax([(query * norm(source)).sum(-1) for source in sources])
    return sum(weight * source for weight, source in zip(weights, sources, strict=True))


def low_rank(site, hidden):
    token_part = torch.einsum("dr,re,...e->...d", site.query_up, site.query_down, norm(hidden))
    return site.key_weight * (site.pseudo_query + token_part)


@of("low-rank-query")
def test_a_low_rank_query_is_the_pseudo_query_and_a_part_of_the_token(strategy):
    def formula(site, sources, running, outputs, last):
        hidden = sources[-1] if strategy.query_from == "output" or last is None else last
        return attend(low_rank(site, hidden), sources)

    check_reads(strategy, formula)


@of("block-lagged")
def test_a_lagged_query_is_made_of_the_newest_source_at_the_start_of_the_block(strategy):
    def formula(site, sources, running, outputs, last):
        return attend(low_rank(site, sources[-2] if running else sources[-1]), sources)

    check_reads(strategy, formula)


@of("sliced-key")
def test_a_sliced_key_is_the_last_channels(strategy):
    rank, size = strategy.rank or DIM // 4, strategy.sublayers_per_block

    def formula(site, sources, running, outputs, last):
        weights = softmax([(site.pseudo_query * norm(source[..., DIM - rank :])).sum(-1) for source in sources])
        lengths = [1, *[min(size, len(outputs) - size * block) for block in range(len(sources) - 1)]]
        values = [s / n for s, n in zip(sources, lengths, strict=True)] if strategy.block_average else sources
        return sum(weight * value for weight, value in zip(weights, values, strict=True))

    check_reads(strategy, formula)


@of("top-k")
def test_top_k_reads_the_highest_scores(strategy):
    def formula(site, sources, running, outputs, last):
        scores = [(site.pseudo_query * site.key_weight * norm(source)).sum(-1) for source in sources]
        ranks = [sum((other > score).long() for other in scores) for score in scores]
        shares = [score.exp() * (rank < strategy.k) for score, rank in zip(scores, ranks, strict=True)]
        return sum((share / sum(shares))[..., None] * s for share, s in zip(shares, sources, strict=True))

    check_reads(strategy, formula)


@of("inkling2")
def test_inkling2_attends_over_normalised_sources(strategy):
    def formula(site, sources, running, outputs, last):
        if not outputs:
            return sources[0]
        keys = [norm(source) for source in sources]
        reads = []
        for query in site.pseudo_query:
            weights = softmax([(query * key).sum(-1) / math.sqrt(DIM) for key in keys])
            reads.append(sum(weight * key for weight, key in zip(weights, keys, strict=True)))
        return torch.stack(reads, -2) if len(reads) > 1 else reads[0]

    check_reads(strategy, formula)


@of("gated")
def test_a_gate_lets_in_the_difference_of_read_and_running_sum(strategy):
    def formula(site, sources, running, outputs, last):
        total = sum(sources)
        return total + site.gate * (attend(site.pseudo_query * site.key_weight, sources) - total)

    check_reads(strategy, formula)


@pytest.mark.parametrize(
    ("strategy", "plain"),
    [
        (LowRankQuery(rank=2), FullAttnRes()),
        (LowRankQuery(rank=2, query_from="read", sublayers_per_block=3), BlockAttnRes(sublayers_per_block=3)),
        (BlockLaggedQuery(rank=2), BlockAttnRes(sublayers_per_block=4)),
        (BlockLaggedQuery(rank=2, phases="one"), BlockAttnRes(sublayers_per_block=4)),
        (SlicedKey(), FullAttnRes()),
        (SlicedKey(sublayers_per_block=3), BlockAttnRes(sublayers_per_block=3)),
        (GatedAttnRes(), PreNorm()),
    ],
    ids=lambda strategy: strategy.label,
)
def test_start(strategy, plain):
    mine, theirs = toy(strategy, scramble=0), toy(plain, scramble=0)
    for one, other in zip(mine(embedding())[0], theirs(embedding())[0], strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def test_gated_starts_as_prenorm_bit_for_bit():
    tokens = torch.randint(64, (2, 7), generator=torch.Generator().manual_seed(0))
    logits = []
    for strategy in (GatedAttnRes(), PreNorm()):
        torch.manual_seed(0)
        logits.append(build(llama(), strategy)(tokens).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("read_scale", ["mean", "sum"])
def test_gates_and_then_queries_get_gradients(read_scale):
    torch.manual_seed(0)
    model = build(llama(), GatedAttnRes(read_scale=read_scale))
    tokens = torch.randint(64, (2, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sites = [model.base_model.residual.site(index) for index in range(1, 5)]
    model(tokens, labels=tokens).loss.backward()
    assert all(site.gate.grad.abs() > 1e-4 for site in sites)
    assert all(site.pseudo_query.grad.abs().max() == 0 for site in sites)
    optimizer.step()
    optimizer.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    assert all(site.pseudo_query.grad.abs().max() > 0 for site in sites)


def test_zero_queries_would_leave_a_gate_without_gradient():
    torch.manual_seed(0)
    model = build(llama(rms_norm_eps=1e-12), GatedAttnRes()).double()
    for site in model.base_model.residual.sites:
        torch.nn.init.zeros_(site.pseudo_query)
    tokens = torch.randint(64, (2, 9))
    model(tokens, labels=tokens).loss.backward()
    assert all(site.gate.grad.abs() < 1e-6 for site in model.base_model.residual.sites)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 20])
def test_two_phases_of_a_lagged_query_are_one_phase(size):
    states, gradients = [], []
    for phases in ("one", "two"):
        model = toy(BlockLaggedQuery(rank=3, sublayers_per_block=size, phases=phases), sublayers=10)
        first = embedding().requires_grad_()
        reads, _ = model(first)
        states.append(torch.stack(reads))
        reads[-1].pow(2).sum().backward()
        gradients.append([first.grad, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*states, **EXACT)
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, **EXACT)


def test_phase_1_of_a_lagged_query_goes_over_the_finished_sources_once(monkeypatch):
    stacked = []
    monkeypatch.setattr(block_lagged, "stack", lambda sources: stacked.append(len(sources)) or torch.stack(sources, -2))
    toy(BlockLaggedQuery(rank=2))(embedding())
    assert stacked == [2, 1, 1, 1]  # the second block's phase 1, then its partial sums


def test_the_first_matrix_of_a_low_rank_query_has_orthonormal_rows_and_the_second_learns_at_once():
    residual = Residual(LowRankQuery(rank=4), 4, 16)
    rows = residual.site(0).query_down.double()
    torch.testing.assert_close(rows @ rows.mT, torch.eye(4).double(), atol=1e-6, rtol=0)
    with torch.device("meta"):
        empty = Residual(LowRankQuery(rank=4), 4, 16)
    for one, other in zip(empty.to_empty(device="cpu").parameters(), residual.parameters(), strict=True):
        assert torch.equal(one, other)
    model = toy(LowRankQuery(rank=4), scramble=0)
    model(embedding())[0][-1].pow(2).sum().backward()
    site = model.residual.site(OUTPUT)
    assert isinstance(site, LowRankQuerySite)
    assert site.query_up.grad.abs().max() > 0


@pytest.mark.parametrize("reads", [1, 3])
def test_inkling2_is_transformers_inkling2(reads):
    torch.manual_seed(0)
    config = SimpleNamespace(hidden_size=DIM, _attn_implementation="eager")
    theirs = Inkling2BlockAttentionResidual(config, num_queries=reads)
    strategy = Inkling2(sublayers_per_block=3, reads="qkv" if reads == 3 else "one")
    mine = Residual(strategy, SUBLAYERS, DIM, eps=1e-6)
    state = mine.start(torch.randn(2, 5, DIM))
    for index in range(SUBLAYERS):
        if index and (index % 2 == 0 or reads == 1):
            query = torch.nn.init.normal_(theirs.query.data)
            mine.site(index).pseudo_query.data.copy_(query.view(reads, DIM))
            expected = theirs(torch.stack(state.sources[:-1], -2), state.sources[-1])
            read = mine.read(state, index)
            seen = read.unbind(-2) if reads == 3 else [read]
            assert len(seen) == len(expected)
            for one, other in zip(seen, expected, strict=True):
                torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-5, atol=1e-5)
        state = mine.write(state, index, torch.randn(2, 5, DIM))


def test_equal_scores_keep_the_newest_sources():
    model = toy(TopK(k=3), scramble=0)
    reads, outputs = model(embedding())
    torch.testing.assert_close(reads[-1], sum(outputs[-3:]) / 3, **EXACT)


def test_what_top_k_leaves_out_gets_no_gradient():
    model = toy(TopK(k=2))
    residual = model.residual
    state = residual.start(embedding().requires_grad_())
    for index in range(SUBLAYERS):
        state = residual.write(state, index, torch.randn_like(embedding()).requires_grad_())
    weights = residual.depth_weights(state, OUTPUT)
    assert ((weights > 0).sum(-1) == 2).all()
    gradients = torch.autograd.grad(residual.read(state, OUTPUT).sum(), state.sources)
    for index, gradient in enumerate(gradients):
        assert torch.equal(gradient.abs().sum(-1) > 0, weights[..., index] > 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LowRankQuery(rank=0), "rank is 0"),
        (lambda: LowRankQuery(query_from="there"), "query_from is 'there'"),
        (lambda: Residual(LowRankQuery(), 4, 8), "rank is 8; allowed is less than the width"),
        (lambda: BlockLaggedQuery(rank=True), "rank is True"),
        (lambda: BlockLaggedQuery(phases="auto"), "phases is 'auto'"),
        (lambda: SlicedKey(rank=0), "rank is 0"),
        (lambda: Residual(SlicedKey(rank=9), 4, 8), "rank is 9; allowed is up to the width"),
        (lambda: Inkling2(reads="two"), "reads is 'two'"),
        (lambda: TopK(k=0), "k is 0"),
        (lambda: GatedAttnRes(query_length=0.0), "query_length is 0"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
