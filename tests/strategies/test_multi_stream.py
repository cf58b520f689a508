"""Strategies with several streams: their formulas in plain loops, where they start, and independent code."""

from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from attnres.errors import ConfigError
from attnres.residual import OUTPUT, PreNorm, Streams
from attnres.residual.rivals.ddl import DeepDeltaLearning
from attnres.residual.rivals.hyper_connections import HyperConnections
from attnres.residual.rivals.mhc import ManifoldHyperConnections, sinkhorn
from attnres.residual.rivals.mhc_lite import MHCLite
from strategies.cases import SETTINGS, case_id
from strategies.toy import DIM, EPS, SUBLAYERS, toy

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def settings(cls):
    return [cls(**values) for values in SETTINGS[cls.short_name]]


def rms_norm(value, eps=EPS):
    return value / (value.square().mean(-1, keepdim=True) + eps).sqrt()


def embed(dtype=torch.float64):
    return torch.randn(2, 3, DIM, dtype=dtype, generator=torch.Generator().manual_seed(5))


def run(model, maps, output_weights):
    """All reads, given maps(site, streams, out) -> weights of a read, of old streams in new ones, of the output."""
    streams = [embed()] * model.residual.strategy.num_streams
    count = range(len(streams))
    reads = []
    for index in range(SUBLAYERS):
        site = model.residual.site(index)
        pre, _, _ = maps(site, streams, None)
        reads.append(sum(pre[s] * streams[s] for s in count))
        output = model.sublayer(index, reads[-1])
        _, mixing, post = maps(site, streams, output)
        streams = [sum(mixing[s][t] * streams[s] for s in count) + post[t] * output for t in count]
    weights = output_weights(model.residual.site(OUTPUT), streams)
    return [*reads, sum(weights[s] * streams[s] for s in count)]


def agree(strategy, maps, output_weights):
    model = toy(strategy)
    with torch.no_grad():
        expected = run(model, maps, output_weights)
        actual, _ = model(embed())
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def ones(site, streams):
    return [1.0] * len(streams)


# ---- hyper-connections


@pytest.mark.parametrize("strategy", settings(HyperConnections), ids=case_id)
def test_hyper_connections_are_their_formula(strategy):
    act = torch.tanh if strategy.tanh else lambda value: value
    m = strategy.streams

    def maps(site, streams, output):
        def varied(s, row, scale):
            if not strategy.dynamic:
                return 0.0
            return site.map_scale[scale] * act((rms_norm(streams[s]) * site.map_weight[row]).sum(-1, keepdim=True))

        read = [site.static_read[s] + varied(s, 0, 0) for s in range(m)]
        mix = [[site.static_mix[s, t] + varied(s, 1 + t, 0) for t in range(m)] for s in range(m)]
        write = [site.static_write[s] + varied(s, 1 + m, 1) for s in range(m)]
        return read, mix, write

    agree(strategy, maps, ones)


@pytest.mark.parametrize("strategy", settings(HyperConnections), ids=case_id)
def test_hyper_connections_start_as_prenorm(strategy):
    reads, _ = toy(strategy, scramble=0.0)(embed())
    expected, _ = toy(PreNorm())(embed())
    expected[-1] = strategy.streams * expected[-1]
    for ours, theirs in zip(reads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def test_hyper_connections_read_the_streams_in_turn():
    model = toy(HyperConnections(), scramble=0.0)
    for index in range(SUBLAYERS):
        assert model.residual.site(index).static_read.tolist() == [float(s == index % 4) for s in range(4)]


def package_sites(model, cls, **options):
    """One module of the `hyper-connections` package per sublayer, with random parameters."""
    torch.manual_seed(3)
    m = model.residual.strategy.streams
    sites = [cls(m, dim=DIM, layer_index=index, **options).double() for index in range(SUBLAYERS)]
    for site in sites:
        for parameter in site.parameters():
            nn.init.normal_(parameter, std=0.5)
    return sites


def package_run(model, sites, embedding):
    """The toy around the package's modules, whose streams lie along the batch."""
    from hyper_connections import get_expand_reduce_stream_functions

    expand, reduce = get_expand_reduce_stream_functions(model.residual.strategy.streams)
    hidden = expand(embedding)
    for index, site in enumerate(sites):
        read, add = site(hidden)
        hidden = add(model.sublayer(index, read))
    return reduce(hidden)


@pytest.mark.parametrize("tanh", [True, False])
def test_hyper_connections_agree_with_the_package_and_so_do_their_gradients(tanh):
    from hyper_connections import HyperConnections as Package

    model = toy(HyperConnections(tanh=tanh))
    sites = package_sites(model, Package, tanh=tanh)
    with torch.no_grad():
        for index, theirs in enumerate(sites):
            ours = model.residual.site(index)
            ours.eps = 0.0  # the package has none
            theirs.norm.gamma.zero_()
            ours.static_read.copy_(theirs.static_alpha[:, 0])
            ours.static_mix.copy_(theirs.static_alpha[:, 1:])
            ours.static_write.copy_(theirs.static_beta)
            ours.map_weight.copy_(torch.cat([theirs.dynamic_alpha_fn.mT, theirs.dynamic_beta_fn[None]]))
            ours.map_scale.copy_(torch.stack([theirs.dynamic_alpha_scale, theirs.dynamic_beta_scale]))
    ours_in, theirs_in = embed().requires_grad_(), embed().requires_grad_()
    probe = torch.randn(2, 3, DIM, dtype=torch.float64)
    reads, _ = model(ours_in)
    expected = package_run(model, sites, theirs_in)
    torch.testing.assert_close(reads[-1], expected, **EXACT)
    (reads[-1] * probe).sum().backward()
    (expected * probe).sum().backward()
    torch.testing.assert_close(ours_in.grad, theirs_in.grad, **EXACT)
    for index, theirs in enumerate(sites):
        ours = model.residual.site(index)
        torch.testing.assert_close(ours.static_read.grad, theirs.static_alpha.grad[:, 0], **EXACT)
        torch.testing.assert_close(ours.static_mix.grad, theirs.static_alpha.grad[:, 1:], **EXACT)
        torch.testing.assert_close(ours.static_write.grad, theirs.static_beta.grad, **EXACT)
        weight = torch.cat([theirs.dynamic_alpha_fn.grad.mT, theirs.dynamic_beta_fn.grad[None]])
        torch.testing.assert_close(ours.map_weight.grad, weight, **EXACT)
        scale = torch.stack([theirs.dynamic_alpha_scale.grad, theirs.dynamic_beta_scale.grad])
        torch.testing.assert_close(ours.map_scale.grad, scale, **EXACT)


def test_a_norm_weight_of_the_package_is_absorbed_by_the_projection():
    from hyper_connections import HyperConnections as Package

    model = toy(HyperConnections())
    theirs, ours = package_sites(model, Package)[0], model.residual.site(0)
    factor = (1 + theirs.norm.gamma).detach()
    with torch.no_grad():
        ours.eps = 0.0
        ours.static_read.copy_(theirs.static_alpha[:, 0])
        ours.map_weight[0].copy_(theirs.dynamic_alpha_fn[:, 0] * factor)
        ours.map_scale[0].copy_(theirs.dynamic_alpha_scale)
        streams = torch.randn(2, 3, 4, DIM, dtype=torch.float64)
        read, _ = theirs(streams.movedim(-2, 1).flatten(0, 1))
        pre = model.residual.strategy.pre(streams, ours)
    torch.testing.assert_close((pre[..., None] * streams).sum(-2), read, **EXACT)


# ---- mHC and mHC-lite


def constrained_maps(strategy, doubly_stochastic):
    m, eps = strategy.streams, getattr(strategy, "map_eps", 0.0)

    def maps(site, streams, output):
        normed = rms_norm(torch.cat(streams, dim=-1))
        raw = [(normed * row).sum(-1, keepdim=True) for row in site.map_weight]
        pre = [site.map_scale[0] * raw[s] + site.pre_bias[s] for s in range(m)]
        post = [site.map_scale[1] * raw[m + s] + site.post_bias[s] for s in range(m)]
        mixing = [site.map_scale[2] * raw[2 * m + k] + bias for k, bias in enumerate(site.res_bias)]
        pre = [value.sigmoid() + eps for value in pre]
        return pre, doubly_stochastic(mixing), [2 * value.sigmoid() for value in post]

    return maps


def sinkhorn_by_hand(logits, rounds, eps):
    """Rows, then columns, as sums in a loop; ``eps`` where DeepSeek-V4 has it."""
    m = int(len(logits) ** 0.5)
    matrix = [[logits[m * s + t].exp() for t in range(m)] for s in range(m)]
    for number in range(rounds):
        first = number == 0
        sums = [sum(row) + (0 if first else eps) for row in matrix]
        matrix = [[value / sums[s] + (eps if first else 0) for value in row] for s, row in enumerate(matrix)]
        sums = [sum(row[t] for row in matrix) + eps for t in range(m)]
        matrix = [[value / sums[t] for t, value in enumerate(row)] for row in matrix]
    return matrix


@pytest.mark.parametrize("strategy", settings(ManifoldHyperConnections), ids=case_id)
def test_mhc_is_its_formula(strategy):
    def head(site, streams):
        if strategy.output == "sum":
            return ones(site, streams)
        normed = rms_norm(torch.cat(streams, dim=-1))
        raw = [(normed * row).sum(-1, keepdim=True) for row in site.map_weight]
        return [
            (site.map_scale * value + bias).sigmoid() + strategy.map_eps
            for value, bias in zip(raw, site.pre_bias, strict=True)
        ]

    def matrix(logits):
        return sinkhorn_by_hand(logits, strategy.sinkhorn_iterations, strategy.map_eps)

    agree(strategy, constrained_maps(strategy, matrix), head)


@pytest.mark.parametrize("strategy", settings(MHCLite), ids=case_id)
def test_mhc_lite_is_its_formula(strategy):
    m = strategy.streams

    def matrix(logits):
        total = sum(value.exp() for value in logits)
        chosen = [[0.0] * m for _ in range(m)]
        for value, permutation in zip(logits, permutations(range(m)), strict=True):
            for s, t in enumerate(permutation):
                chosen[s][t] = chosen[s][t] + value.exp() / total
        return chosen

    agree(strategy, constrained_maps(strategy, matrix), ones)


@pytest.mark.parametrize("cls", [ManifoldHyperConnections, MHCLite])
def test_mhc_starts_with_the_streams_nearly_apart_and_reads_one_mainly(cls):
    model = toy(cls(), scramble=0.0)
    streams = torch.randn(2, 3, 4, DIM, dtype=torch.float64)
    for index in range(SUBLAYERS):
        site = model.residual.site(index)
        res, post = model.residual.strategy.res_post(streams, site, embed())
        torch.testing.assert_close(res, torch.eye(4).double().expand_as(res), rtol=0, atol=1e-2)
        main = torch.tensor([1.0 if s == index % 4 else -1.0 for s in range(4)]).double()
        expected = main.sigmoid().expand(2, 3, 4)
        torch.testing.assert_close(model.residual.strategy.pre(streams, site), expected, **EXACT)
        torch.testing.assert_close(post, 2 * expected, **EXACT)


def test_mhc_lite_is_doubly_stochastic_to_rounding_and_a_few_rounds_of_sinkhorn_are_not():
    streams = 3 * torch.randn(2, 3, 4, DIM, dtype=torch.float64)

    def worst(strategy):
        model = toy(strategy, scramble=3.0)
        res, _ = strategy.res_post(streams, model.residual.site(0), embed())
        return max((res.sum(axis) - 1).abs().max().item() for axis in (-1, -2))

    assert worst(MHCLite()) < 1e-14
    assert worst(ManifoldHyperConnections(sinkhorn_iterations=2)) > 1e-4


def test_a_learned_output_starts_as_half_the_sum():
    streams = torch.randn(2, 3, 4, DIM, dtype=torch.float64)
    strategy = ManifoldHyperConnections(output="learned")
    site = toy(strategy, scramble=0.0).residual.site(OUTPUT)
    torch.testing.assert_close(strategy.pre(streams, site), torch.full((2, 3, 4), 0.5).double())


@pytest.mark.parametrize("rounds", [1, 3, 20])
def test_the_package_normalises_in_the_other_order(rounds):
    """Its matrix is ours with rows and columns exchanged; the two meet as the iteration converges."""
    from hyper_connections.manifold_constrained_hyper_connections import sinkhorn_knopps

    logits = torch.randn(5, 4, 4)
    theirs = sinkhorn_knopps(logits, rounds)
    torch.testing.assert_close(theirs, sinkhorn(logits.mT, rounds).mT, rtol=1e-5, atol=1e-6)
    assert torch.allclose(theirs, sinkhorn(logits, rounds), atol=1e-6) == (rounds == 20)


def copy_package_mhc(ours, theirs):
    """The package makes row s of its maps from stream s alone: a block of our projection per stream."""
    m = ours.streams
    with torch.no_grad():
        ours.eps = 0.0
        theirs.norm.gamma.zero_()
        blocks = ours.map_weight.zero_().unflatten(-1, (m, DIM))  # [rows, streams, dim], a view
        for s in range(m):
            blocks[s, s] = theirs.dynamic_alpha_fn[0, :, 0]
            blocks[m + s, s] = theirs.dynamic_beta_fn
            blocks[2 * m + m * s : 2 * m + m * (s + 1), s] = theirs.dynamic_alpha_fn[0, :, 1:].mT
        scales = (theirs.pre_branch_scale, theirs.h_post_scale[None], theirs.residual_scale)
        ours.map_scale.copy_(torch.cat(scales))
        ours.pre_bias.copy_(theirs.static_alpha[:, 0])
        ours.res_bias.copy_(theirs.static_alpha[:, 1:].flatten())
        ours.post_bias.copy_(theirs.static_beta)


def test_mhc_agrees_with_the_package_where_the_streams_are_equally_loud():
    """Then norms of one stream and of all are the same; gradients of the maps' parameters agree too."""
    from hyper_connections import mHC

    strategy = ManifoldHyperConnections(sinkhorn_iterations=300)  # converged, so the order does not matter
    model = toy(strategy)
    theirs, ours = package_sites(model, mHC, sinkhorn_iters=300)[0], model.residual.site(0)
    copy_package_mhc(ours, theirs)
    streams = 2 * rms_norm(torch.randn(2, 3, 4, DIM, dtype=torch.float64), 0.0)
    output, probe = embed(), torch.randn(2, 3, 4, DIM, dtype=torch.float64)
    read, add = theirs(streams.movedim(-2, 1).flatten(0, 1))
    written = add(output).unflatten(0, (2, 4)).movedim(1, -2)
    state = Streams(streams)
    close = {"rtol": 1e-4, "atol": 2e-5}  # the package computes in float32
    torch.testing.assert_close(strategy.read(state, ours), read, **close)
    new = strategy.write(state, ours, output).hidden
    torch.testing.assert_close(new, written, **close)
    ((new * probe).sum() + strategy.read(state, ours).square().sum()).backward()
    ((written * probe).sum() + read.square().sum()).backward()
    torch.testing.assert_close(ours.pre_bias.grad, theirs.static_alpha.grad[:, 0], **close)
    torch.testing.assert_close(ours.res_bias.grad.unflatten(0, (4, 4)), theirs.static_alpha.grad[:, 1:], **close)
    torch.testing.assert_close(ours.post_bias.grad, theirs.static_beta.grad, **close)
    blocks = ours.map_weight.grad.unflatten(-1, (4, DIM))
    pre = sum(blocks[s, s] for s in range(4))
    torch.testing.assert_close(pre, theirs.dynamic_alpha_fn.grad[0, :, 0], **close)
    mixing = sum(blocks[8 + 4 * s : 12 + 4 * s, s] for s in range(4))
    torch.testing.assert_close(mixing, theirs.dynamic_alpha_fn.grad[0, :, 1:].mT, **close)


def test_mhc_agrees_with_the_package_through_a_whole_model_if_the_maps_are_static():
    from hyper_connections import mHC

    model = toy(ManifoldHyperConnections(sinkhorn_iterations=300))
    sites = package_sites(model, mHC, sinkhorn_iters=300)
    for index, theirs in enumerate(sites):
        nn.init.zeros_(theirs.dynamic_alpha_fn)
        nn.init.zeros_(theirs.dynamic_beta_fn)
        copy_package_mhc(model.residual.site(index), theirs)
    ours_in, theirs_in = embed().requires_grad_(), embed().requires_grad_()
    reads, _ = model(ours_in)
    expected = package_run(model, sites, theirs_in)
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(reads[-1], expected, **close)
    reads[-1].square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours_in.grad, theirs_in.grad, rtol=1e-3, atol=1e-3 * theirs_in.grad.abs().max().item())


@pytest.mark.parametrize("rounds", [1, 3, 20])
def test_mhc_agrees_with_deepseek_v4_and_so_do_its_gradients(rounds):
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

    hc_eps = 1e-3  # large enough that leaving it out somewhere would show
    config = SimpleNamespace(hc_mult=4, hc_sinkhorn_iters=rounds, hc_eps=hc_eps, rms_norm_eps=EPS, hidden_size=DIM)
    strategy = ManifoldHyperConnections(sinkhorn_iterations=rounds, map_eps=hc_eps, output="learned")
    model = toy(strategy, dtype=torch.float32)
    modules, head = [DeepseekV4HyperConnection(config) for _ in range(SUBLAYERS)], DeepseekV4HyperHead(config)
    with torch.no_grad():
        for index, theirs in enumerate(modules):
            ours = model.residual.site(index)
            theirs.fn.copy_(ours.map_weight)
            theirs.scale.copy_(ours.map_scale)
            theirs.base.copy_(torch.cat([ours.pre_bias, ours.post_bias, ours.res_bias]))
        ours = model.residual.site(OUTPUT)
        head.hc_fn.copy_(ours.map_weight)
        head.hc_scale.copy_(ours.map_scale)
        head.hc_base.copy_(ours.pre_bias)
    ours_in, theirs_in = embed(torch.float32).requires_grad_(), embed(torch.float32).requires_grad_()
    reads, _ = model(ours_in)
    hidden = theirs_in.unsqueeze(2).expand(-1, -1, 4, -1).contiguous()
    for index, theirs in enumerate(modules):
        post, comb, read = theirs(hidden)
        torch.testing.assert_close(reads[index], read, rtol=1e-4, atol=1e-4)
        output = model.sublayer(index, read)
        hidden = post.unsqueeze(-1) * output.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), hidden)
    merged = head(hidden)
    torch.testing.assert_close(reads[-1], merged, rtol=1e-4, atol=1e-4)
    reads[-1].square().sum().backward()
    merged.square().sum().backward()

    def same(ours, theirs):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max().item())

    same(ours_in.grad, theirs_in.grad)
    for index, theirs in enumerate(modules):
        ours = model.residual.site(index)
        same(ours.map_weight.grad, theirs.fn.grad)
        same(ours.map_scale.grad, theirs.scale.grad)
        same(torch.cat([ours.pre_bias.grad, ours.post_bias.grad, ours.res_bias.grad]), theirs.base.grad)
    same(model.residual.site(OUTPUT).map_weight.grad, head.hc_fn.grad)


# ---- Deep Delta Learning


@pytest.mark.parametrize("strategy", settings(DeepDeltaLearning), ids=case_id)
def test_ddl_is_its_formula(strategy):
    """By the matrix form, (I - beta k k^T) X + beta k v^T, token by token."""
    model = toy(strategy)
    m = strategy.streams
    with torch.no_grad():
        actual, _ = model(embed())
        matrix = embed()[..., None].expand(2, 3, DIM, m)  # D rows, m columns
        expected = []
        for index in range(SUBLAYERS + 1):
            site = model.residual.site(index)
            weight = site.read_weight if m > 1 else torch.ones(1).double()
            read = torch.stack([sum(weight[j] * matrix[..., d, j] for j in range(m)) for d in range(DIM)], dim=-1)
            expected.append(read)
            if index == SUBLAYERS:
                break
            output = model.sublayer(index, read)
            new = torch.empty_like(matrix)
            for place in [(b, t) for b in range(2) for t in range(3)]:
                new[place] = delta_step(strategy, site, matrix[place], read[place], output[place])
            matrix = new
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def delta_step(strategy, site, matrix, read, output):
    k = output / (output.dot(output) + 1e-5**2).sqrt()
    context = rms_norm(read)
    if strategy.beta_hidden:
        context = torch.tanh(site.beta_in @ context)
    beta = 2 * torch.sigmoid(site.beta_weight.dot(context) + site.beta_bias)
    if strategy.value == "constant":
        v = torch.full((strategy.streams,), 2.0).double()
    else:
        v = site.value_weight @ read + site.value_bias
        v = v if strategy.value == "linear" else 4 * torch.sigmoid(v)
    return (torch.eye(DIM).double() - beta * torch.outer(k, k)) @ matrix + beta * torch.outer(k, v)


def test_ddl_with_a_gate_of_one_leaves_the_value_and_nothing_else_along_the_output():
    strategy = DeepDeltaLearning(value="constant")
    model = toy(strategy, scramble=0.0)
    site, output = model.residual.site(0), embed()
    with torch.no_grad():
        site.beta_weight.zero_()
        written = strategy.write(strategy.start(embed().flip(-1)), site, output).hidden
    direction = output / output.norm(dim=-1, keepdim=True)
    held = (written * direction[..., None, :]).sum(-1)
    torch.testing.assert_close(held, torch.full_like(held, 2.0))


def test_ddl_reads_the_mean_of_its_streams_at_the_start_and_its_gate_starts_where_it_is_told():
    model = toy(DeepDeltaLearning(beta_start=0.5), scramble=0.0)
    site = model.residual.site(2)
    assert site.read_weight.tolist() == [0.25] * 4
    assert 2 * site.beta_bias.sigmoid().item() == pytest.approx(0.5)


# ---- refusals


@pytest.mark.parametrize(
    ("cls", "wrong"),
    [
        (HyperConnections, {"streams": 0}),
        (ManifoldHyperConnections, {"streams": True}),
        (ManifoldHyperConnections, {"sinkhorn_iterations": 0}),
        (ManifoldHyperConnections, {"map_eps": -1e-6}),
        (ManifoldHyperConnections, {"output": "mean"}),
        (MHCLite, {"streams": 7}),
        (DeepDeltaLearning, {"streams": 0}),
        (DeepDeltaLearning, {"value": "tanh"}),
        (DeepDeltaLearning, {"value_scale": 0.0}),
        (DeepDeltaLearning, {"beta_start": 2.0}),
        (DeepDeltaLearning, {"beta_hidden": -1}),
    ],
)
def test_a_wrong_setting_is_refused_by_name(cls, wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"{name} is "):
        cls(**wrong)
