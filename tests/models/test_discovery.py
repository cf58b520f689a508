"""Decoders that no table knows: described by watching them run, and accepted only if the proof passes."""

import copy

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Starcoder2Model
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2DecoderLayer

from attnres.errors import ConfigError, UnsupportedModelError
from attnres.models import FAMILIES, convert, unconvert
from attnres.models.discovery import discover
from attnres.models.families import Family, SublayerParts
from attnres.residual import BlockAttnRes, FullAttnRes
from models.small import ALL_CONFIGS, COMMON, make

UNKNOWN = {
    "Starcoder2": {},
    "Granite": {},
    "Glm4": {},
    "Cohere": {},
    "Phi": {},
    "Olmo3": {},
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
    "GPTBigCode": {},
}


def unknown(name, **changes):
    torch.manual_seed(1)
    sizes = {"num_hidden_layers": 3, **({} if name == "GPTBigCode" else {"num_key_value_heads": 2})}
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **sizes, **UNKNOWN[name], **changes})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_decoder_is_converted_without_loss_and_back(name):
    plain, ids = unknown(name), torch.randint(3, 96, (2, 9))
    assert not {type(module).__name__ for module in plain.modules()} & set(FAMILIES)
    expected = plain(ids).logits
    converted = convert(plain, BlockAttnRes(sublayers_per_block=3))
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, expected, rtol=1e-4, atol=1e-5)
    described = Family.from_dict(converted.config.attnres_family)
    assert {type(layer.original()).__name__ for layer in getattr(converted.base_model, described.layers)} == {
        described.layer_class
    }
    assert torch.equal(unconvert(converted)(ids).logits, expected)
    assert "attnres_family" not in vars(plain.config)


@pytest.mark.parametrize("family", [name for name in ALL_CONFIGS if name != "gpt2"])
def test_what_is_found_is_what_the_table_says(family):
    base = make(family).base_model
    known = FAMILIES[type(base.layers[0]).__name__]
    found = discover(base)
    assert (found.layers, found.norm, found.layer_class) == (known.layers, known.norm, known.layer_class)
    assert found.is_parallel(base.layers[0]) == known.is_parallel(base.layers[0])
    assert (found.attention, found.mlp) == (known.attention, known.mlp)


def test_the_kinds_of_parts_are_told_apart():
    assert discover(unknown("Glm4").model).attention == SublayerParts(
        module="self_attn", norm="input_layernorm", output_norm="post_self_attn_layernorm"
    )
    cohere = discover(unknown("Cohere").model)
    assert cohere.parallel
    assert cohere.mlp.norm == cohere.attention.norm == "input_layernorm"
    assert discover(unknown("Olmo3").model).attention.norm is None


def test_a_scaled_residual_is_refused_with_the_difference():
    plain = unknown("Granite", residual_multiplier=0.5)
    before = copy.deepcopy(plain.state_dict())
    with pytest.raises(UnsupportedModelError, match=r"GraniteModel layer 0 .* differs from its two sublayers by 0\."):
        convert(plain, FullAttnRes())
    assert type(plain.model.layers[0]).__name__ == "GraniteDecoderLayer"
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in plain.modules())


class _Shifted(Starcoder2Model):
    """Adds something between its layers, which the layers know nothing of."""

    def forward(self, inputs_embeds, use_cache=None):
        hidden = inputs_embeds
        positions = torch.arange(hidden.shape[1])[None]
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, position_embeddings=self.rotary_emb(hidden, positions), attention_mask=None)
            hidden = hidden + 0.1 if index == 1 else hidden
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


def test_something_between_the_layers_is_refused_by_the_whole_model():
    plain = _Shifted(unknown("Starcoder2").config)
    with pytest.raises(UnsupportedModelError, match="this _Shifted model cannot be run on cpu: 'RunningSum' object"):
        convert(plain, FullAttnRes())
    assert type(plain.layers[0]).__name__ == "Starcoder2DecoderLayer"
    assert not hasattr(plain, "residual")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Mamba", r"its layers \(MambaBlock\) do not look like one attention and one MLP: they call norm, mixer"),
        ("Bloom", r"its layers \(BloomBlock\) return a tuple; allowed are layers that return a tensor"),
        ("Falcon", r"its layers \(FalconDecoderLayer\) return a tuple; allowed are layers that return a tensor"),
    ],
)
def test_other_architectures_are_refused_by_name(name, message):
    config = getattr(transformers, f"{name}Config")(**{**COMMON, "num_hidden_layers": 2})
    with pytest.raises(UnsupportedModelError, match=message):
        convert(AutoModelForCausalLM.from_config(config), FullAttnRes())


class _DropsByFunction(Starcoder2DecoderLayer):
    """Drops values in training, in a way that no child module shows."""

    def forward(self, hidden_states, **arguments):
        return torch.nn.functional.dropout(super().forward(hidden_states, **arguments), 0.5, self.training)


def test_dropout_that_is_no_module_is_refused(monkeypatch):
    plain = unknown("Starcoder2")
    random_state = torch.get_rng_state()
    convert(copy.deepcopy(plain), FullAttnRes())
    assert torch.equal(torch.get_rng_state(), random_state)
    for layer in plain.model.layers:
        layer.__class__ = _DropsByFunction
    with pytest.raises(UnsupportedModelError, match=r"layer 0 \(_DropsByFunction\) differs .* in training mode"):
        convert(plain, FullAttnRes())


@pytest.mark.parametrize("name", ["Phi", "StableLm", "GPTBigCode"])
def test_dropout_that_is_a_module_stays(name):
    rates = {"Phi": {"resid_pdrop": 0.4}, "StableLm": {"hidden_dropout": 0.4}, "GPTBigCode": {"resid_pdrop": 0.4}}
    UNKNOWN.setdefault(name, {})
    plain, ids = unknown(name, **rates[name]).train(), torch.randint(3, 96, (2, 9))
    outputs = []
    for model in (plain, convert(copy.deepcopy(plain), FullAttnRes())):
        torch.manual_seed(7)
        outputs.append(model(ids, use_cache=False).logits)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def test_tensors_of_a_layers_own_are_refused():
    plain = unknown("Starcoder2")
    plain.model.layers[1].register_buffer("scale", torch.ones(1))
    with pytest.raises(
        UnsupportedModelError, match=r"layer 1 \(Starcoder2DecoderLayer\) has tensors of its own .*scale"
    ):
        convert(plain, FullAttnRes())


def test_weights_that_are_not_finite_are_said_to_be():
    plain = make("llama")
    torch.nn.init.constant_(plain.model.layers[0].mlp.up_proj.weight, float("nan"))
    with pytest.raises(UnsupportedModelError, match="Llama gives values that are not finite"):
        convert(plain, FullAttnRes())


@pytest.mark.parametrize("strategy", [None, "block", FullAttnRes])
def test_what_is_no_strategy_is_refused(strategy):
    with pytest.raises(ConfigError, match=r"strategy is .*; allowed is one of attnres\.residual"):
        convert(make("llama"), strategy)


def test_a_description_survives_json_and_a_broken_one_is_refused():
    for family in FAMILIES.values():
        assert Family.from_dict(family.to_dict()) == family
    with pytest.raises(ConfigError, match=r"attnres_family is .*allowed is the description of a family"):
        Family.from_dict({"name": "x"})
    whole = FAMILIES["LlamaDecoderLayer"].to_dict()
    for wrong in ({"layers": 3}, {"parallel": 2}, {"drops": {"a": [1]}}, {"mlp": {"module": None}}):
        with pytest.raises(ConfigError, match="names are strings"):
            Family.from_dict({**whole, **wrong})
