"""Strategies that weigh one stream against an output, each against its published formula written out."""

import math

import pytest
import torch
from transformers import LlamaConfig

from attnres.errors import ConfigError
from attnres.models import build
from attnres.residual import PreNorm, Strategy
from attnres.residual.rivals.highway import Highway
from attnres.residual.rivals.laurel import Laurel
from attnres.residual.rivals.layerscale import LayerScale, start_by_depth
from attnres.residual.rivals.nanochat import NanochatResidual
from attnres.residual.rivals.rescaled import RescaledResidual
from attnres.residual.rivals.rezero import ReZero
from strategies.toy import DIM, EPS, SUBLAYERS, Toy, assert_reads, embedding, toy

LAYERS = SUBLAYERS // 2


def sublayer(model: Toy, index: int, value: torch.Tensor) -> torch.Tensor:
    """A sublayer with its own norm."""
    normed = value / (value.square().mean(-1, keepdim=True) + EPS).sqrt() * model.norms[index].weight
    return torch.tanh(model.linears[index](torch.cat([normed] * 3, dim=-1))) * (1 + index % 3)


def test_rescaled_residual_is_the_mean_of_everything():
    model = toy(RescaledResidual())
    start = embedding()
    values, reads = [start], []
    for index in range(SUBLAYERS):
        reads.append(torch.stack(values).mean(0))
        values.append(sublayer(model, index, reads[-1]))
    assert_reads(model, start, [*reads, torch.stack(values).mean(0)])


def test_rescaled_residual_follows_its_recursion():
    model = toy(RescaledResidual())
    start = h = embedding()
    reads = []
    for l in range(1, SUBLAYERS + 1):  # noqa: E741
        reads.append(h)
        h = l / (l + 1) * h + sublayer(model, l - 1, h) / (l + 1)
    assert_reads(model, start, [*reads, h])


def test_rezero_is_its_formula():
    model = toy(ReZero())
    start = x = embedding()
    reads = []
    for index in range(SUBLAYERS):
        reads.append(x)
        x = x + model.residual.sites[index].alpha * sublayer(model, index, x)
    assert_reads(model, start, [*reads, x])


@pytest.mark.parametrize("init", [1e-4, None])
def test_layerscale_is_its_formula(init):
    model = toy(LayerScale(init=init))
    start = x = embedding()
    reads = []
    for index in range(SUBLAYERS):
        reads.append(x)
        x = x + sublayer(model, index, x) @ torch.diag(model.residual.sites[index].channel_scale)
    assert_reads(model, start, [*reads, x])


@pytest.mark.parametrize("per_channel", [False, True])
def test_highway_is_its_formula(per_channel):
    model = toy(Highway(per_channel=per_channel))
    start = x = embedding()
    reads = []
    for index in range(SUBLAYERS):
        reads.append(x)
        site = model.residual.sites[index]
        normed = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        g = 1 / (1 + torch.exp(-(torch.einsum("...d,cd->...c", normed, site.gate_weight) + site.gate_bias)))
        assert g.shape[-1] == (DIM if per_channel else 1)
        x = (1 - g) * x + g * sublayer(model, index, x)
    assert_reads(model, start, [*reads, x])


@pytest.mark.parametrize("normalization", ["softmax", "sigmoid", "none"])
def test_laurel_is_its_formula(normalization):
    model = toy(Laurel(normalization=normalization))
    start = x = embedding()
    reads = []
    for index in range(SUBLAYERS):
        reads.append(x)
        b, a = model.residual.sites[index].mix_weight
        if normalization == "softmax":
            beta, alpha = b.exp() / (a.exp() + b.exp()), a.exp() / (a.exp() + b.exp())
        elif normalization == "sigmoid":
            beta, alpha = 1 / (1 + (-b).exp()), 1 / (1 + (-a).exp())
        else:
            beta, alpha = b, a
        x = alpha * sublayer(model, index, x) + beta * x
    assert_reads(model, start, [*reads, x])


@pytest.mark.parametrize("back_out", [True, False])
def test_nanochat_is_its_formula(back_out):
    model = toy(NanochatResidual(back_out=back_out))
    sites = model.residual.sites
    x0 = x = embedding()
    reads, middle = [], None
    for layer in range(LAYERS):
        scalars = sites[max(2 * layer - 1, 0)]  # of a later layer, where the MLP before it writes
        x = scalars.stream_scale * x + scalars.embedding_scale * x0
        for index in (2 * layer, 2 * layer + 1):
            reads.append(x)
            x = x + sublayer(model, index, x)
        if layer == LAYERS // 2:
            middle = x
    if back_out:
        x = x - sites[SUBLAYERS].middle_scale * middle
    assert_reads(model, x0, [*reads, x])


def test_nanochat_starts_with_the_published_scalars():
    sites = toy(NanochatResidual(), scramble=0.0).residual.sites
    for layer in range(LAYERS):
        site = sites[max(2 * layer - 1, 0)]
        torch.testing.assert_close(site.stream_scale.item(), 1.15 - 0.10 * layer / (LAYERS - 1))
        torch.testing.assert_close(site.embedding_scale.item(), 0.20 - 0.15 * layer / (LAYERS - 1))
    torch.testing.assert_close(sites[SUBLAYERS].middle_scale.item(), 0.2)
    count = sum(parameter.numel() for parameter in sites.parameters())
    assert count == 2 * LAYERS + 1


def test_the_first_layer_of_nanochat_reads_more_than_the_embedding():
    x = embedding()
    reads, _ = toy(NanochatResidual(), scramble=0.0)(x)
    torch.testing.assert_close(reads[0], 1.35 * x, rtol=1e-6, atol=0)


def test_rezero_starts_as_nothing():
    x = embedding()
    model = toy(ReZero(), scramble=0.0)
    reads, outputs = model(x)
    assert all(torch.equal(read, x) for read in reads)
    reads[-1].sum().backward()
    assert all(site.alpha.grad.abs() > 0 for site in list(model.residual.sites)[:-1])
    assert all((linear.weight.grad == 0).all() for linear in model.linears)
    assert len(outputs) == SUBLAYERS


@pytest.mark.parametrize(("layers", "start"), [(12, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6), (48, 1e-6)])
def test_layerscale_starts_by_the_number_of_decoder_layers(layers, start):
    assert start_by_depth(2 * layers) == start
    site = LayerScale(init=None).site(0, 2 * layers, DIM, eps=EPS, device=None, dtype=None)
    assert (site.channel_scale == start).all()


def test_layerscale_starts_at_its_setting():
    for site in list(toy(LayerScale(init=0.25), scramble=0.0).residual.sites)[:-1]:
        assert (site.channel_scale == 0.25).all()


MEANS = [RescaledResidual(), Highway(), Highway(per_channel=True), Laurel(), Laurel(normalization="sigmoid")]


@pytest.mark.parametrize("strategy", MEANS, ids=repr)
def test_some_start_as_the_mean_of_everything(strategy):
    x = embedding()
    reads, outputs = toy(strategy, scramble=0.0)(x)
    for index, read in enumerate(reads):
        mean = torch.stack([x, *outputs[:index]]).mean(0)
        torch.testing.assert_close(read, mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("strategy", [*MEANS, Laurel(normalization="none")], ids=repr)
def test_some_start_as_the_function_of_prenorm(strategy):
    def logits(with_strategy: Strategy) -> torch.Tensor:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            rms_norm_eps=1e-12,
        )
        return build(config, with_strategy).double()(input_ids=torch.arange(12)[None]).logits

    torch.testing.assert_close(logits(strategy), logits(PreNorm()), rtol=1e-5, atol=1e-7)


def test_the_rescaled_residual_is_prenorm_at_any_weights():
    torch.manual_seed(1)
    rescaled, plain = toy(RescaledResidual()), toy(PreNorm())
    plain.norms.load_state_dict(rescaled.norms.state_dict())
    plain.linears.load_state_dict(rescaled.linears.state_dict())
    x = embedding()
    (reads, _), (sums, _) = rescaled(x), plain(x)
    for count, (read, total) in enumerate(zip(reads, sums, strict=True), 1):
        torch.testing.assert_close(count * read, total, rtol=1e-4, atol=1e-4)


def test_a_highway_with_a_fixed_bias_starts_near_the_carry():
    x = embedding()
    reads, outputs = toy(Highway(gate_bias=-2.0), scramble=0.0)(x)
    gate = 1 / (1 + math.exp(2.0))
    torch.testing.assert_close(reads[1], (1 - gate) * x + gate * outputs[0])


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_weights_of_a_highway_read_sum_to_one(per_channel):
    model = toy(Highway(per_channel=per_channel))
    for linear in model.linears:  # every output is the same as the embedding
        torch.nn.init.zeros_(linear.weight)
    x = embedding()
    state = model.residual.start(x)
    for index in range(SUBLAYERS):
        state = model.residual.write(state, index, x)
        torch.testing.assert_close(model.residual.read(state, index + 1), x)


@pytest.mark.parametrize(
    ("strategy", "setting", "value"),
    [
        (LayerScale, "init", -1e-4),
        (LayerScale, "init", float("nan")),
        (LayerScale, "init", True),
        (LayerScale, "init", "depth"),
        (Laurel, "normalization", "relu"),
        (Highway, "per_channel", 1),
        (Highway, "gate_bias", float("inf")),
        (Highway, "gate_bias", "carry"),
        (NanochatResidual, "back_out", 0.2),
    ],
)
def test_settings_are_refused_by_name(strategy, setting, value):
    with pytest.raises(ConfigError, match=f"{setting} is {value!r}; allowed"):
        strategy(**{setting: value})


ALL = [ReZero(), LayerScale(), LayerScale(init=None), Highway(), Laurel(), NanochatResidual()]


@pytest.mark.parametrize("strategy", ALL, ids=repr)
def test_parameters_are_exact_after_the_meta_device(strategy):
    expected = toy(strategy, scramble=0.0, dtype=torch.float32).residual
    with torch.device("meta"):
        residual = Toy(strategy).residual
    residual.to_empty(device="cpu")
    other = dict(residual.named_parameters())
    assert other.keys() == dict(expected.named_parameters()).keys()
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, other[name])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointed_gradients_of_nanochat_are_bitwise_equal(autocast, use_reentrant):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4
    )
    model = build(config, NanochatResidual()).train()
    ids = torch.randint(64, (2, 6))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    for gradient, other in zip(gradients(), expected, strict=True):
        assert torch.equal(gradient, other)
