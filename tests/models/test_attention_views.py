"""Attention with three reads, through real models: each projection is fed by its own, and nothing else changes."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from attnres.errors import UnsupportedModelError
from attnres.models import build, convert
from attnres.residual import OUTPUT
from attnres.residual.rivals.hybrid_norm import HybridNorm
from attnres.residual.rivals.muddformer import MUDDFormer
from attnres.residual.variants.inkling2 import Inkling2
from models.small import CONFIGS

TOKENS = torch.tensor([[5, 9, 2, 40, 17, 3], [1, 1, 8, 60, 33, 95]])


def three_reads(family, **changes):
    """A float64 model whose three reads differ."""
    torch.manual_seed(0)
    model = build(CONFIGS[family](**changes), MUDDFormer()).double().eval()
    with torch.no_grad():
        for parameter in model.model.residual.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model


def rms_norm(norm, value):
    """As the families have it: in float32 even for float64."""
    narrow = value.float()
    return norm.weight * (narrow / (narrow.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()).double()


def rotate(value, theta):
    """Rotary embedding of ``[T, width]``: channel i is paired with i + width / 2."""
    tokens, width = value.shape
    half = width // 2
    rates = torch.tensor([theta ** (-2 * i / width) for i in range(half)], dtype=torch.float64)
    angles = (
        torch.arange(tokens, dtype=torch.float64)[:, None] * rates.float().double()
    )  # the model keeps float32 rates
    cos, sin = angles.float().cos().double(), angles.float().sin().double()  # in float32, as the families have it
    first, second = value[:, :half], value[:, half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(module, config, query_in, key_in, value_in):
    """Grouped-query attention of one sequence, head by head."""
    width = module.head_dim
    shared = config.num_attention_heads // config.num_key_value_heads
    theta = config.rope_parameters["rope_theta"]
    heads = []
    for head in range(config.num_attention_heads):
        own, common = (slice(width * h, width * (h + 1)) for h in (head, head // shared))
        query, key = query_in @ module.q_proj.weight[own].T, key_in @ module.k_proj.weight[common].T
        value = value_in @ module.v_proj.weight[common].T
        if hasattr(module, "q_norm"):
            query, key = rms_norm(module.q_norm, query), rms_norm(module.k_norm, key)
        scores = rotate(query, theta) @ rotate(key, theta).T / math.sqrt(width)
        later = torch.ones_like(scores).triu(1).bool()
        heads.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ value)
    return torch.cat(heads, dim=-1) @ module.o_proj.weight.T


def mlp(module, value):
    gate = value @ module.gate_proj.weight.T
    return (gate * gate.sigmoid() * (value @ module.up_proj.weight.T)) @ module.down_proj.weight.T


def mixes(site, finished):
    """Each stream's mix of the layer outputs."""
    newest = finished[-1]
    hidden = newest / (newest.square().mean(-1, keepdim=True) + site.eps).sqrt() @ site.in_weight.T
    hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    varied = (hidden @ site.out_weight.T).unflatten(-1, site.static_weight.shape)
    weights = varied + site.static_weight
    return [sum(weights[:, s, j, None] * y for j, y in enumerate(finished)) for s in range(len(site.static_weight))]


def by_hand(model, tokens):
    """Logits of one sequence."""
    base, config = model.model, model.config
    finished = [base.embed_tokens.weight[tokens]]
    for index, layer in enumerate(base.layers):
        if index == 0:
            query = key = value = residual = finished[0]
        else:
            query, key, value, residual = mixes(base.residual.site(2 * index), finished)
        inputs = [rms_norm(layer.input_layernorm, read) for read in (query, key, value)]
        hidden = residual + attention(layer.self_attn, config, *inputs)
        finished.append(hidden + mlp(layer.mlp, rms_norm(layer.post_attention_layernorm, hidden)))
    (output,) = mixes(base.residual.site(OUTPUT), finished)
    return rms_norm(base.norm, output) @ model.lm_head.weight.T


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_with_three_reads_is_what_one_computes_by_hand(family):
    model = three_reads(family)
    with torch.no_grad():
        logits = model(TOKENS, use_cache=False).logits
        expected = torch.stack([by_hand(model, tokens) for tokens in TOKENS])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)  # norms and rotations are float32


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_each_projection_gets_its_own_read_after_the_layers_norm(family):
    model = three_reads(family)
    reads, seen = {}, {}

    class Reads:
        def on_read(self, site, state, value):
            reads[site] = value

        def on_write(self, site, state, output):
            pass

    layer = model.model.layers[2]
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = getattr(layer.self_attn, name)
        projection.register_forward_hook(lambda module, args, output, name=name: seen.update({name: (args[0], output)}))
    with torch.no_grad(), model.model.residual.listen(Reads()):
        model(TOKENS, use_cache=False)
    assert reads[4].shape == (2, 6, 3, 32)
    normed = layer.input_layernorm(reads[4])
    for view, name in enumerate(("q_proj", "k_proj", "v_proj")):
        given, output = seen[name]
        assert torch.equal(given, normed[..., view, :])
        torch.testing.assert_close(output, normed[..., view, :] @ getattr(layer.self_attn, name).weight.T)
    assert not torch.allclose(seen["q_proj"][0], seen["k_proj"][0])
    assert not torch.allclose(seen["k_proj"][0], seen["v_proj"][0])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_conversion_to_three_reads_starts_as_the_same_function(family):
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(CONFIGS[family]()).double().eval()
    with torch.no_grad():
        expected = plain(TOKENS, use_cache=False).logits
        converted = convert(plain, MUDDFormer())
        torch.testing.assert_close(converted(TOKENS, use_cache=False).logits, expected, rtol=1e-9, atol=1e-9)


def test_an_attention_without_three_projections_is_refused_by_name():
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModelError, match=r"Kimi Linear attention .* is not just q_proj, k_proj, v_proj"):
        build(CONFIGS["kimi_linear"](), MUDDFormer())


@pytest.mark.parametrize("strategy", [MUDDFormer(), Inkling2(), HybridNorm()], ids=lambda strategy: strategy.short_name)
def test_an_attention_that_also_gates_by_its_input_is_refused_and_the_model_stays_as_it_was(strategy):
    """Kimi Delta Attention has the three projections, and gates that would get the reads side by side."""
    plain = AutoModelForCausalLM.from_config(CONFIGS["kimi_linear"](layers=2)).eval()
    before, ids = type(plain), torch.tensor([[5, 9, 2]])
    with torch.no_grad():
        expected = plain(ids, use_cache=False).logits
    with pytest.raises(UnsupportedModelError, match=r"Kimi Linear attention \(KimiLinearDeltaAttention\) is not just"):
        convert(plain, strategy)
    assert type(plain) is before
    assert all(parameter.requires_grad for parameter in plain.parameters())
    with torch.no_grad():
        assert torch.equal(plain(ids, use_cache=False).logits, expected)
