import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, LlamaModel

from attnres.errors import ConfigError, UnsupportedModelError
from attnres.models import build, convert
from attnres.models import families as families_module
from attnres.residual import BlockAttnRes, DepthSite, FullAttnRes, PreNorm
from models.small import CONFIGS, llama, make

FAMILIES = list(CONFIGS)
BLOCK = BlockAttnRes(sublayers_per_block=3)


def tokens(*shape):
    return torch.randint(3, 96, shape)


def randomise(model, std=0.5):
    for site in model.base_model.residual.sites:
        if isinstance(site, DepthSite):
            nn.init.normal_(site.pseudo_query, std=std)
            nn.init.normal_(site.key_weight, mean=1.0, std=0.3)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", [PreNorm(), FullAttnRes(), BLOCK], ids=str)
def test_base_parameter_names_do_not_change_and_plain_checkpoints_load(family, strategy):
    plain = make(family)
    state = copy.deepcopy(plain.state_dict())
    converted = convert(plain, strategy)
    own = {name for name in converted.state_dict() if name.startswith("model.residual.")}
    assert set(converted.state_dict()) - own == set(state)
    assert len(own) == (0 if isinstance(strategy, PreNorm) else 2 * (2 * len(converted.model.layers) + 1))
    fresh = build(CONFIGS[family](), strategy)
    missing, unexpected = fresh.load_state_dict(state, strict=False)
    assert set(missing) == own
    assert unexpected == []


@pytest.mark.parametrize("family", FAMILIES)
def test_prenorm_by_the_interface_is_bitwise_the_original_model(family):
    plain, ids = make(family), tokens(2, 9)
    converted = convert(copy.deepcopy(plain), PreNorm())
    expected = plain(ids, labels=ids)
    actual = converted(ids, labels=ids)
    assert torch.equal(actual.logits, expected.logits)
    expected.loss.backward()
    actual.loss.backward()
    for (name, mine), theirs in zip(converted.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", [FullAttnRes(), BLOCK], ids=str)
def test_greedy_generation_is_the_same_with_and_without_cache(family, strategy):
    plain, ids = make(family), tokens(2, 7)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    converted = convert(copy.deepcopy(plain), strategy)
    expected = plain.generate(ids, **options)
    assert torch.equal(converted.generate(ids, **options), expected)
    assert torch.equal(converted.generate(ids, use_cache=False, **options), expected)
    randomise(converted)
    with_cache = converted.generate(ids, **options)
    assert torch.equal(converted.generate(ids, use_cache=False, **options), with_cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_attentions_and_router_logits_keep_working(family):
    ids = tokens(2, 6)
    plain = make(family, attn_implementation="eager")
    flags = {"output_hidden_states": True, "output_attentions": True}
    if family == "kimi_linear":
        flags["output_router_logits"] = True
    expected = plain(ids, **flags)  # also installs Transformers' hooks before the layers are replaced
    for model in (convert(copy.deepcopy(plain), FullAttnRes()), build(plain.config, FullAttnRes(read_scale="sum"))):
        model.load_state_dict(plain.state_dict(), strict=False)
        actual = model.eval()(ids, **flags)
        assert len(actual.hidden_states) == len(expected.hidden_states) == len(plain.model.layers) + 1
        for field in ("hidden_states", "attentions", "router_logits"):
            mine, theirs = getattr(actual, field, None), getattr(expected, field, None)
            assert (mine is None) == (theirs is None)
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        assert "hidden_states" not in model(ids)


def test_hidden_states_are_what_each_layer_reads_and_can_be_selected():
    model, ids = randomise(convert(make("llama"), BLOCK)), tokens(1, 5)
    read = {}

    class Keep:
        def on_read(self, site, state, value):
            read[site] = value

        def on_write(self, site, state, output): ...

    with model.model.residual.listen(Keep()):
        outputs = model(ids, output_hidden_states=True)
    for layer in range(3):
        assert torch.equal(outputs.hidden_states[layer], read[2 * layer])
    assert torch.equal(model.lm_head(outputs.hidden_states[3]), outputs.logits)
    last = model(ids, output_hidden_states=[-1]).hidden_states
    assert [state is None for state in last] == [True, True, True, False]
    assert torch.equal(last[-1], outputs.hidden_states[-1])


def gradients(model, ids, wrap=lambda model: None):
    model = copy.deepcopy(model).train()
    wrap(model)
    loss = model(ids, labels=ids, use_cache=False).loss  # a cache would be written twice by a recomputed layer
    loss.backward()
    return {"loss": loss.detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}


def reentrant(model):
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


def non_reentrant(model):
    model.activation_checkpointing_enable({"use_reentrant": False})


def every_second_layer(model):
    model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=2)


def wrapped_by_torch(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.model.layers = nn.ModuleList(map(checkpoint_wrapper, model.model.layers))


@pytest.mark.parametrize("wrap", [reentrant, non_reentrant, every_second_layer, wrapped_by_torch])
@pytest.mark.parametrize("strategy", [PreNorm(), FullAttnRes(), BLOCK, BlockAttnRes(sublayers_per_block=4)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_activation_checkpointing_gives_bitwise_the_gradients_of_the_plain_run(family, strategy, wrap):
    model, ids = randomise(convert(make(family), strategy)), tokens(2, 9)
    plain, wrapped = gradients(model, ids), gradients(model, ids, wrap)
    if wrap is wrapped_by_torch:
        wrapped = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in wrapped.items()}
    assert plain.keys() == wrapped.keys()
    different = [n for n in plain if plain[n] is not wrapped[n] and not torch.equal(plain[n], wrapped[n])]
    assert different == []
    assert sum(grad is not None for grad in plain.values()) > 20


def test_each_read_runs_once_more_when_a_checkpointed_layer_is_recomputed():
    model, ids, count = convert(make("llama"), BLOCK).train(), tokens(1, 4), []

    class Count:
        def on_read(self, site, state, value):
            count.append(site)

        def on_write(self, site, state, output): ...

    reentrant(model)
    with model.model.residual.listen(Count()):
        model(ids, labels=ids).loss.backward()
    assert sorted(count) == sorted([0, 1, 2, 3, 4, 5] * 2 + [6])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", [PreNorm(), BLOCK], ids=str)
def test_compiles_as_one_graph_and_agrees_with_eager(strategy):
    model, ids = randomise(convert(make("llama"), strategy)), tokens(2, 8)
    expected = model(ids).logits
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiling_layer_by_layer_makes_one_graph_per_kind_of_sublayer():
    model, ids = randomise(convert(make("llama", layers=12), BlockAttnRes(sublayers_per_block=24))), tokens(2, 8)
    expected = model(ids, use_cache=False).logits
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 2  # norm and attention, norm and MLP


def test_functional_transforms_reach_through_a_read():
    model, ids = randomise(convert(make("llama"), BLOCK)), tokens(2, 6)
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (ids,), {"labels": ids, "use_cache": False}).loss

    by_func = torch.func.grad(loss)(parameters)
    model(ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(by_func[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_checkpointing_switched_on_before_conversion_goes_on_working():
    plain, ids = make("llama"), tokens(2, 9)
    without = gradients(convert(copy.deepcopy(plain), BLOCK), ids)
    non_reentrant(plain)
    before = gradients(convert(plain, BLOCK), ids)
    assert all(torch.equal(value, before[name]) for name, value in without.items())


def test_float64_stays_float64_under_autocast_and_the_meta_device_has_a_forward():
    plain, ids = make("llama").double(), tokens(2, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(ids).logits
        actual = convert(copy.deepcopy(plain), FullAttnRes())(ids).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    with torch.device("meta"):
        model = build(llama(), BLOCK)
    positions, mask = torch.arange(5)[None], torch.ones(2, 1, 5, 5, dtype=torch.bool, device="meta")
    output = model(ids.to("meta"), position_ids=positions.to("meta"), attention_mask=mask, use_cache=False)
    assert output.logits.shape == (2, 5, 96)


def test_the_final_norm_still_takes_a_tensor():
    model = convert(make("llama"), BLOCK)
    hidden = torch.randn(2, 5, 32)
    assert torch.equal(model.model.norm(hidden), make("llama").model.norm(hidden))


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_values_survive_every_way_a_hugging_face_model_is_made(family):
    config = CONFIGS[family]()

    def untouched(model):
        sites = model.model.residual.sites
        zeros = all(bool((site.pseudo_query == 0).all()) for site in sites)
        return zeros and all(bool((site.key_weight == 1).all()) for site in sites)

    model = build(config, BLOCK)
    assert untouched(model)
    model.init_weights()
    assert untouched(model)
    randomise(model).model.residual.reset_parameters()
    assert untouched(model)
    randomise(model)
    for module in model.modules():
        model._init_weights(module)  # what Transformers does for weights that a checkpoint lacks
    assert untouched(model)
    with torch.device("meta"):
        model = build(config, BLOCK)
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.full((4000, 32), 7.0)
    assert untouched(model.to_empty(device="cpu"))


def test_the_same_seed_gives_the_same_base_weights_under_every_strategy():
    models = []
    for strategy in (PreNorm(), FullAttnRes(), BLOCK):
        torch.manual_seed(3)
        models.append(build(llama(), strategy))
    base = dict(models[0].named_parameters())
    for model in models[1:]:
        assert all(torch.equal(dict(model.named_parameters())[name], value) for name, value in base.items())


def test_build_reads_the_mean_and_convert_the_sum_unless_told():
    assert build(llama(), FullAttnRes()).model.residual.strategy.read_scale == "mean"
    assert convert(make("llama"), FullAttnRes()).model.residual.strategy.read_scale == "sum"
    assert build(llama(), FullAttnRes(read_scale="sum")).model.residual.strategy.read_scale == "sum"
    assert convert(make("llama"), FullAttnRes(read_scale="mean")).model.residual.strategy.read_scale == "mean"


def test_a_converted_model_has_a_config_of_its_own_that_names_the_strategy():
    config = llama()
    model = build(config, BLOCK)
    assert not hasattr(config, "attnres")
    assert model.config.attnres["type"] == "BlockAttnRes"
    assert model.config.attnres["sublayers_per_block"] == 3
    assert model.model.config is model.config
    assert '"sublayers_per_block": 3' in model.config.to_json_string()


def test_eps_is_the_base_models():
    assert {site.eps for site in convert(make("llama", rms_norm_eps=3e-5), BLOCK).model.residual.sites} == {3e-5}


def test_a_model_without_head_converts_too():
    plain, ids = LlamaModel(llama()).eval(), tokens(2, 5)
    expected = plain(ids).last_hidden_state
    converted = convert(plain, BLOCK)
    assert isinstance(converted, LlamaModel)
    torch.testing.assert_close(converted(ids).last_hidden_state, expected, rtol=1e-5, atol=1e-5)


def test_copies_and_pickles_are_independent_models():
    model, ids = randomise(convert(make("llama"), BLOCK)), tokens(2, 5)
    expected = model(ids).logits
    copied = copy.deepcopy(model)
    buffer = io.BytesIO(pickle.dumps(model))
    loaded = pickle.load(buffer)  # noqa: S301  our own bytes
    for site in model.model.residual.sites:
        nn.init.zeros_(site.pseudo_query)
    assert not torch.equal(model(ids).logits, expected)
    assert torch.equal(copied(ids).logits, expected)
    assert torch.equal(loaded(ids).logits, expected)


def test_bfloat16_models_keep_their_dtype():
    model, ids = build(llama(), BLOCK, dtype=torch.bfloat16), tokens(2, 5)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(ids).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("training", [True, False])
def test_the_proof_leaves_modes_parameters_and_random_state_alone(training):
    plain = make("kimi_linear").train(training)
    plain.model.layers[1].mlp.eval()
    modes = [module.training for module in plain.model.layers[1].mlp.modules()]
    random_state = torch.get_rng_state()
    converted = convert(plain, BLOCK)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in converted.model.layers[1].mlp.modules()] == modes
    assert converted.model.layers[0].training == training
    assert all(not module._forward_hooks for module in converted.modules())


def test_a_wrong_description_of_a_family_is_refused_with_the_difference(monkeypatch):
    good = families_module.FAMILIES["LlamaDecoderLayer"]
    swapped = families_module.Family(
        name="Llama",
        layer_class="LlamaDecoderLayer",
        attention=replace(good.attention, norm=good.mlp.norm),
        mlp=replace(good.mlp, norm=good.attention.norm),
    )
    monkeypatch.setitem(families_module.FAMILIES, "LlamaDecoderLayer", swapped)
    plain = make("llama")
    for layer in plain.model.layers:
        nn.init.uniform_(layer.input_layernorm.weight, 0.5, 1.5)
    with pytest.raises(UnsupportedModelError, match=r"Llama layer 0 \(LlamaDecoderLayer\) differs .* by 0\.\d+ rel"):
        convert(plain, BLOCK)
    assert type(plain).__name__ == "LlamaForCausalLM"
    assert type(plain.model.layers[0]).__name__ == "LlamaDecoderLayer"
    assert not hasattr(plain.model, "residual")


def test_the_proof_sees_a_difference_of_a_part_in_ten_thousand(monkeypatch):
    plain = make("llama")
    right = type(plain.model.layers[0]).forward
    monkeypatch.setattr(type(plain.model.layers[0]), "forward", lambda *a, **k: right(*a, **k) * (1 + 1e-4))
    with pytest.raises(UnsupportedModelError, match=r"differs from its two sublayers by 0\.0001 relative"):
        convert(plain, BLOCK)


def test_every_kind_of_layer_is_proved_not_only_the_first(monkeypatch):
    plain = make("kimi_linear")
    layer_class = type(plain.model.layers[4])
    right = layer_class.forward

    def forward(self, hidden_states, **arguments):
        output = right(self, hidden_states, **arguments)
        return output if self.block_type == "linear_attention" else 2 * output

    monkeypatch.setattr(layer_class, "forward", forward)
    with pytest.raises(UnsupportedModelError, match=r"Kimi Linear layer 4 .* by 0\.5 relative"):
        convert(plain, BLOCK)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(2, 2), "model is a Linear; allowed is a transformers.PreTrainedModel"),
        (lambda: BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
                                      vocab_size=9)), "BertModel is no known family and has no single list"),
        (lambda: convert(make("llama"), BLOCK), r"has a residual strategy already \(Block AttnRes \(S=3\)\)"),
    ],
    ids=["module", "bert", "twice"],
)  # fmt: skip
def test_other_models_are_refused_by_name(model, message):
    with pytest.raises(UnsupportedModelError, match=message):
        convert(model(), BLOCK)


def test_layers_with_hooks_are_refused_because_they_would_be_lost():
    hooked, patched = make("llama"), make("llama")
    hooked.model.layers[1].register_forward_hook(lambda *_: None)
    patched.model.layers[2].forward = patched.model.layers[2].forward
    for model, index in ((hooked, 1), (patched, 2)):
        with pytest.raises(UnsupportedModelError, match=rf"layer {index} \(LlamaDecoderLayer\) has hooks or a forward"):
            convert(model, BLOCK)


def test_a_config_that_names_another_strategy_is_refused():
    model = convert(make("llama"), BLOCK)
    with pytest.raises(ConfigError, match="the config says attnres="):
        build(model.config, FullAttnRes())
    assert build(model.config, BlockAttnRes(sublayers_per_block=3, read_scale="sum")).model.residual is not None


def test_unknown_layers_are_refused_by_name():
    plain = make("llama")
    plain.model.layers[1] = nn.Identity()
    with pytest.raises(UnsupportedModelError, match="LlamaModel is no known family and cannot be tried"):
        convert(plain, BLOCK)


def test_a_strategy_that_does_not_fit_the_depth_leaves_the_model_as_it_was():
    plain = make("llama")
    with pytest.raises(ConfigError, match="num_blocks is 7; allowed is 1 to 6"):
        convert(plain, BlockAttnRes(num_blocks=7))
    assert type(plain.model.layers[0]).__name__ == "LlamaDecoderLayer"
