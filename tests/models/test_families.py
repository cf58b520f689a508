"""Every family: lossless conversion, generation with and without cache, and the way back."""

import copy

import pytest
import torch
from torch import nn

from attnres.errors import UnsupportedModelError
from attnres.models import FAMILIES, build, convert, scale_report, unconvert
from attnres.residual import BlockAttnRes, DepthSite, FullAttnRes, PreNorm
from attnres.residual.rivals.postnorm import PostNorm
from attnres.residual.variants.top_k import TopK
from models.small import ALL_CONFIGS, make

STRATEGIES = [FullAttnRes(), BlockAttnRes(sublayers_per_block=3), BlockAttnRes(num_blocks=2)]
READ_WITHOUT_NORM = {"olmo2"}


def trained_like(family, **changes):
    """A model whose norms and biases are not ones and zeros, as after training."""
    torch.manual_seed(len(family))
    model = make(family, **changes)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        del name
    return model


def tokens(*shape):
    return torch.randint(3, 96, shape)


def relative(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def randomise(model):
    for site in model.base_model.residual.sites:
        assert isinstance(site, DepthSite)
        nn.init.normal_(site.pseudo_query, std=0.5)
    return model


def test_every_family_of_the_table_has_a_small_model_here():
    classes = set()
    for family in ALL_CONFIGS:
        base = make(family).base_model
        classes |= {type(layer).__name__ for layer in (base.h if family == "gpt2" else base.layers)}
    assert classes == set(FAMILIES)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("family", ALL_CONFIGS)
def test_conversion_is_lossless_in_logits_and_gradients(family, strategy):
    plain, ids = trained_like(family), tokens(2, 11)
    converted = convert(copy.deepcopy(plain), strategy)
    expected, actual = plain(ids, labels=ids), converted(ids, labels=ids)
    assert relative(actual.logits, expected.logits) < 1e-5
    with torch.no_grad():  # reads with the norm fused in
        assert relative(converted(ids).logits, expected.logits) < 1e-5
    expected.loss.backward()
    actual.loss.backward()
    mine = dict(converted.named_parameters())
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(mine[name].grad, parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ALL_CONFIGS)
def test_sixty_four_greedy_tokens_are_the_same_with_and_without_cache(family):
    plain, ids = trained_like(family), tokens(2, 7)
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    expected = plain.generate(ids, **options)
    converted = convert(plain, BlockAttnRes(sublayers_per_block=3))
    assert torch.equal(converted.generate(ids, **options), expected)
    assert torch.equal(converted.generate(ids, use_cache=False, **options), expected)


@pytest.mark.parametrize("family", ALL_CONFIGS)
def test_with_learned_queries_a_cache_changes_nothing(family):
    model, ids = randomise(convert(trained_like(family), BlockAttnRes(sublayers_per_block=3))), tokens(2, 9)
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :5], use_cache=True)
        rest = model(ids[:, 5:], cache=first.cache, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], dim=1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ALL_CONFIGS)
def test_the_way_back_is_the_model_one_came_from(family):
    plain, ids = trained_like(family), tokens(2, 6)
    expected, before = plain(ids).logits, copy.deepcopy(plain)
    converted = convert(plain, FullAttnRes())
    converted(ids, output_hidden_states=True)
    back = unconvert(converted)
    assert back is plain
    assert type(back) is type(before)
    assert type(back.config) is type(before.config)
    assert back.config.to_dict() == before.config.to_dict()
    assert [name for name, _ in back.named_modules()] == [name for name, _ in before.named_modules()]
    assert torch.equal(back(ids).logits, expected)
    hidden = back(ids, output_hidden_states=True).hidden_states
    assert len(hidden) == len(before(ids, output_hidden_states=True).hidden_states)
    assert isinstance(convert(back, PreNorm()), type(before))


def test_the_way_back_keeps_what_the_weights_have_learned_since():
    model, ids = convert(trained_like("llama"), FullAttnRes()), tokens(1, 5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    weights = {name: value.clone() for name, value in model.state_dict().items() if ".residual." not in name}
    model.model.layers[1].self_attn.q_proj = nn.Linear(32, 32, bias=False)  # as when an adapter is put in
    weights["model.layers.1.self_attn.q_proj.weight"] = model.model.layers[1].self_attn.q_proj.weight
    with pytest.raises(UnsupportedModelError, match=r"queries that are not zero.*allow_change=True"):
        unconvert(model)
    back = unconvert(model, allow_change=True)
    assert set(back.state_dict()) == set(weights)
    assert all(torch.equal(value, weights[name]) for name, value in back.state_dict().items())
    back(ids)


@pytest.mark.parametrize("family", ALL_CONFIGS)
def test_a_mean_is_refused_where_something_reads_it_without_a_norm(family):
    strategy = FullAttnRes(read_scale="mean")
    report = scale_report(make(family).base_model, FAMILIES[type(next(iter(layers(family)))).__name__])
    assert report.is_scale_free == (family not in READ_WITHOUT_NORM)
    assert all(eps > 0 for _, eps in report.eps)
    if family not in READ_WITHOUT_NORM:
        convert(make(family), strategy)
        return
    with pytest.raises(UnsupportedModelError, match=r"read without a norm .*layers\.0\.self_attn.*allow_change=True"):
        convert(make(family), strategy)
    plain, ids = trained_like(family), tokens(1, 5)
    expected = plain(ids).logits
    assert relative(convert(plain, strategy, allow_change=True)(ids).logits, expected) > 1e-2


def layers(family):
    base = make(family).base_model
    return base.h if family == "gpt2" else base.layers


@pytest.mark.parametrize("family", ["olmo2", "gemma2", "gpt_neox"])
def test_strategies_that_move_the_norm_are_refused_where_a_sublayer_has_more_than_one(family):
    with pytest.raises(UnsupportedModelError, match="moves the norm before each sublayer"):
        convert(make(family), PostNorm())


def test_cross_attention_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"layer 0 \(GPT2Block\) has crossattention, ln_cross_attn besides"):
        convert(make("gpt2", add_cross_attention=True), FullAttnRes())


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "gemma3"])
def test_checkpointing_leaves_the_gradients_as_they_are(family, use_reentrant):
    model, ids = randomise(convert(make(family), BlockAttnRes(sublayers_per_block=3))), tokens(2, 9)
    gradients = []
    for on in (False, True):
        copied = copy.deepcopy(model).train()
        if on:
            copied.activation_checkpointing_enable({"use_reentrant": use_reentrant})
            copied.enable_input_require_grads()
        copied(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in copied.parameters()])
    assert all(one is two is None or torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_a_parallel_layer_is_one_sublayer():
    assert len(convert(make("gpt_neox"), FullAttnRes()).base_model.residual.sites) == 3 + 1
    assert len(convert(make("gpt_neox_sequential"), FullAttnRes()).base_model.residual.sites) == 6 + 1


@pytest.mark.parametrize("family", ["olmo2", "gpt2", "gemma2"])
def test_new_models_of_every_kind_of_family_can_be_built(family):
    model, ids = build(ALL_CONFIGS[family](), FullAttnRes()), tokens(1, 5)
    assert model.base_model.residual.strategy.read_scale == "mean"
    model(ids, labels=ids).loss.backward()


def test_a_final_norm_that_was_replaced_does_not_stop_the_way_back():
    model = convert(make("llama"), FullAttnRes())
    model.model.norm = copy.deepcopy(make("llama").model.norm)
    assert type(unconvert(model)).__name__ == "LlamaForCausalLM"
    model(tokens(1, 4))


def test_what_may_be_another_function_is_not_taken_out_unless_that_is_allowed():
    for strategy in (FullAttnRes(read_scale="mean"), TopK(k=2)):
        with pytest.raises(UnsupportedModelError, match="the plain model is another function"):
            unconvert(convert(make("llama"), strategy))
    assert type(unconvert(convert(make("llama"), PreNorm()))).__name__ == "LlamaForCausalLM"


def test_a_head_without_a_final_norm_notices_a_mean_and_not_a_sum():
    plain, ids = trained_like("llama"), tokens(1, 6)
    plain.model.norm = nn.Identity()
    report = scale_report(plain.model, FAMILIES["LlamaDecoderLayer"])
    assert report.without_norm == ("the head",)
    with pytest.raises(UnsupportedModelError, match=r"read without a norm .*\(the head\)"):
        convert(copy.deepcopy(plain), FullAttnRes(read_scale="mean"))
    expected = plain(ids).logits
    assert relative(convert(plain, FullAttnRes())(ids).logits, expected) < 1e-5
