"""Strategies that differ in where norms stand, each against its published formula written out."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Qwen3Config

from attnres.errors import ConfigError, UnsupportedModelError
from attnres.models import build
from attnres.optim import param_groups
from attnres.residual import PreNorm, Residual
from attnres.residual.rivals.deepnorm import DeepNorm
from attnres.residual.rivals.hybrid_norm import HybridNorm
from attnres.residual.rivals.keel import Keel
from attnres.residual.rivals.postnorm import PostNorm
from attnres.residual.rivals.sandwich import SandwichNorm
from attnres.residual.rivals.siamese import SiameseNorm
from models.small import kimi_linear
from strategies.toy import DIM, EPS, SUBLAYERS, Toy, assert_reads, embedding, toy

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def norm(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return value / (value.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def apply(model: Toy, index: int, value: torch.Tensor) -> torch.Tensor:
    """A sublayer without its norm."""
    return torch.tanh(model.linears[index](torch.cat([value] * 3, dim=-1))) * (1 + index % 3)


def test_postnorm_is_its_formula():
    model = toy(PostNorm())
    weights = [layer_norm.weight for layer_norm in model.norms]
    start = embedding()
    x, reads = norm(start, weights[0]), []
    for index in range(SUBLAYERS):
        reads.append(x)
        total = x + apply(model, index, x)
        x = norm(total, weights[index + 1]) if index + 1 < SUBLAYERS else total  # the last norm is the model's
    assert_reads(model, start, [*reads, x])


def test_deepnorm_is_its_formula():
    model = toy(DeepNorm())
    weights = [layer_norm.weight for layer_norm in model.norms]
    alpha = (2 * SUBLAYERS / 2) ** (1 / 4)
    start = embedding()
    x, reads = norm(start, weights[0]), []
    for index in range(SUBLAYERS):
        reads.append(x)
        total = alpha * x + apply(model, index, x)
        x = norm(total, weights[index + 1]) if index + 1 < SUBLAYERS else total
    assert_reads(model, start, [*reads, x])


def test_sandwich_norm_is_its_formula():
    model = toy(SandwichNorm())
    start = x = embedding()
    reads = []
    for index in range(SUBLAYERS):
        reads.append(x)
        inner = apply(model, index, norm(x, model.norms[index].weight))
        x = x + norm(inner, model.residual.sites[index].output_norm_weight)
    assert_reads(model, start, [*reads, x])


@pytest.mark.parametrize("star", [False, True])
def test_hybrid_norm_is_its_formula(star):
    model = toy(HybridNorm(first_prenorm=star))
    weights = [layer_norm.weight for layer_norm in model.norms]
    start = x = embedding()
    reads = []
    for index in range(0, SUBLAYERS, 2):
        prenorm = star and index == 0
        reads.append(x)
        y = x + apply(model, index, norm(x, weights[index]) if prenorm else x)
        normed = norm(y, weights[index + 1])
        reads.append(y if prenorm else normed)
        x = (y if prenorm else normed) + apply(model, index + 1, normed)
    assert_reads(model, start, [*reads, x])


@pytest.mark.parametrize("alpha", [None, 2.5])
def test_keel_is_its_formula(alpha):
    model = toy(Keel(alpha=alpha))
    factor = SUBLAYERS if alpha is None else alpha
    start = x = embedding()
    reads = []
    for index in range(SUBLAYERS):
        reads.append(x)
        total = factor * x + apply(model, index, norm(x, model.norms[index].weight))
        last = index + 1 == SUBLAYERS
        x = total if last else norm(total, model.residual.sites[index + 1].stream_norm_weight)
    assert_reads(model, start, [*reads, x])


@pytest.mark.parametrize("scaling", [True, False])
def test_siamese_norm_is_its_formula(scaling):
    model = toy(SiameseNorm(depth_scaling=scaling))
    sites = model.residual.sites
    start = x = y = embedding()
    reads = []
    for index in range(SUBLAYERS):
        reads.append(x + norm(y, sites[index].pre_norm_weight))
        output = apply(model, index, norm(reads[-1], model.norms[index].weight))
        divisor = (2 * (index // 2 + 1)) ** 0.5 if scaling else 1
        x = norm(x + output / divisor, sites[index + 1].post_norm_weight)
        y = y + output
    assert_reads(model, start, [*reads, x + norm(y, sites[SUBLAYERS].pre_norm_weight)])


@pytest.mark.parametrize("strategy", [SandwichNorm(), Keel(), SiameseNorm()], ids=repr)
def test_added_norms_start_at_one(strategy):
    for parameter in toy(strategy, scramble=0.0).residual.parameters():
        assert (parameter == 1).all()


@pytest.mark.parametrize("strategy", [PostNorm(), DeepNorm()], ids=repr)
def test_post_norms_are_those_of_the_base_model(strategy):
    names = dict(build(LlamaConfig(**SIZES), PreNorm()).named_parameters())
    assert dict(build(LlamaConfig(**SIZES), strategy).named_parameters()).keys() == names.keys()


@pytest.mark.parametrize("strategy", [PostNorm(), DeepNorm(), HybridNorm()], ids=repr)
def test_a_strategy_that_applies_norms_needs_them(strategy):
    with pytest.raises(ConfigError, match=r"applies the norm of sublayer 0 itself; give it with norms="):
        Residual(strategy, 4, DIM)


@pytest.mark.parametrize(
    ("strategy", "setting", "value"),
    [
        (HybridNorm, "first_prenorm", 1),
        (SiameseNorm, "depth_scaling", "yes"),
        (Keel, "alpha", 0.0),
        (Keel, "alpha", float("inf")),
        (Keel, "alpha", True),
    ],
)
def test_settings_are_refused_by_name(strategy, setting, value):
    with pytest.raises(ConfigError, match=f"{setting} is {value!r}; allowed"):
        strategy(**{setting: value})


def test_deepnorm_scales_value_output_and_mlp_projections_and_nothing_else():
    config = LlamaConfig(**SIZES, attention_bias=True)
    torch.manual_seed(0)
    plain = dict(build(config, PreNorm()).named_parameters())
    torch.manual_seed(0)
    scaled = dict(build(config, DeepNorm()).named_parameters())
    beta = (8 * config.num_hidden_layers) ** (-1 / 4)
    changed = set()
    for name, parameter in plain.items():
        kind = next((part for part in name.split(".") if part.endswith("_proj")), "")
        factor = beta if kind in ("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj") else 1.0
        torch.testing.assert_close(scaled[name], factor * parameter, rtol=1e-6, atol=0)
        if not torch.equal(scaled[name], parameter):
            changed.add(kind)
    assert changed == {"v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_deepnorm_counts_decoder_layers():
    assert DeepNorm().weight_gain(2 * 24) == pytest.approx((8 * 24) ** (-1 / 4))
    assert DeepNorm().site(0, 2 * 24, DIM, eps=EPS, device=None, dtype=None).alpha == pytest.approx((2 * 24) ** (1 / 4))


def per_head(value: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of each head, one at a time."""
    heads = value.split(weight.shape[0], dim=-1)
    return torch.cat([h / (h.square().mean(-1, keepdim=True) + eps).sqrt() * weight for h in heads], dim=-1)


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config])
def test_hybrid_norm_normalises_projections_head_by_head(config_class):
    config = config_class(**SIZES)
    model = build(config, HybridNorm())
    own = () if config_class is LlamaConfig else ("q_proj", "k_proj")
    attention, site = model.model.layers[1].self_attn, model.model.residual.site(2)
    with torch.no_grad():
        for parameter in site.parameters():
            parameter.uniform_(0.5, 1.5)
    hidden = torch.randn(2, 5, 32)
    for name in ("q_proj", "k_proj", "v_proj"):
        projection, weight = getattr(attention, name), getattr(site, f"{name}_norm_weight")
        raw = nn.functional.linear(hidden, projection.weight)
        if name in own:  # the family's own norm serves
            assert weight is None
            torch.testing.assert_close(projection(hidden), raw)
        else:
            assert weight.shape == (8,)
            torch.testing.assert_close(projection(hidden), per_head(raw, weight, config.rms_norm_eps))


@pytest.mark.parametrize("star", [False, True])
def test_hybrid_norm_freezes_the_norms_it_does_not_apply(star):
    model = build(LlamaConfig(**SIZES), HybridNorm(first_prenorm=star))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {f"model.layers.{layer}.input_layernorm.weight" for layer in range(star, 3)}
    ids = torch.randint(64, (2, 6))
    before = model(input_ids=ids).logits
    with torch.no_grad():
        for name in frozen:
            model.get_parameter(name).fill_(3.0)
    assert torch.equal(model(input_ids=ids).logits, before)
    grouped = {name for group in param_groups(model, lr=1e-3) for name, _ in group["params"]}
    assert grouped == dict(model.named_parameters()).keys() - frozen


def test_hybrid_norm_weights_belong_to_the_strategy():
    model = build(LlamaConfig(**SIZES), HybridNorm())
    sites = [f"model.residual.sites.{2 * layer}" for layer in range(3)]
    expected = {f"{site}.{name}_proj_norm_weight" for site in sites for name in "qkv"}
    assert {name for name, _ in model.named_parameters() if "residual" in name} == expected
    for parameter in model.model.residual.parameters():
        assert (parameter == 1).all()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
def test_a_copy_with_projection_norms_uses_its_own_weights(duplicate):
    torch.manual_seed(0)
    model = build(LlamaConfig(**SIZES), HybridNorm())
    other = duplicate(model)
    ids = torch.randint(64, (2, 6))
    before = model(input_ids=ids).logits
    assert torch.equal(other(input_ids=ids).logits, before)
    with torch.no_grad():
        for parameter in other.model.residual.parameters():
            parameter.uniform_(0.5, 1.5)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not torch.equal(other(input_ids=ids).logits, before)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("strategy", [HybridNorm(), SiameseNorm()], ids=repr)
def test_checkpointed_gradients_are_bitwise_equal(strategy, autocast, use_reentrant):
    torch.manual_seed(0)
    model = build(LlamaConfig(**SIZES), strategy).train()
    ids = torch.randint(64, (2, 6))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad]

    expected = gradients()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    for gradient, other in zip(gradients(), expected, strict=True):
        assert torch.equal(gradient, other)


def test_hybrid_norm_compiles_whole():
    torch.manual_seed(0)
    model = build(LlamaConfig(**SIZES), HybridNorm())
    ids = torch.randint(64, (2, 6))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, model(input_ids=ids).logits)


def test_a_family_without_separate_projections_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"Kimi Linear attention .* is not just q_proj, k_proj, v_proj"):
        build(kimi_linear(), HybridNorm())
