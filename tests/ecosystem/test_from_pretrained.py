"""Converted models by Transformers' own ways of saving and loading."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from attnres.errors import CheckpointError, ConfigError
from attnres.models.classes import check_placed
from attnres.models.layer import ResidualDecoderLayer
from attnres.residual import STRATEGIES, BlockAttnRes, DepthSite, FullAttnRes
from ecosystem.checkpoints import config_of, learned, saved
from models.small import ALL_CONFIGS
from strategies.cases import cases


def tokens(*shape):
    return torch.randint(3, 96, shape)


@pytest.mark.parametrize("family", ALL_CONFIGS)
def test_a_saved_model_is_loaded_bit_for_bit(family, tmp_path):
    model, ids = learned(family), tokens(2, 7)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(loaded) is type(model)
    assert loaded.base_model.residual.strategy == model.base_model.residual.strategy
    state = model.state_dict()
    assert set(loaded.state_dict()) == set(state)
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_survives_saving_and_loading(name, tmp_path):
    strategy = next(case for case in cases() if case.short_name == name)
    model, ids = learned(strategy=strategy), tokens(2, 6)
    with torch.no_grad():
        for parameter in model.model.residual.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.model.residual.strategy == model.model.residual.strategy
    assert torch.equal(loaded(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


ORDERS = (
    "import attnres; import transformers",
    "import transformers; import attnres",
    "from transformers import AutoModelForCausalLM; import attnres",
    "import attnres; from transformers import AutoConfig, AutoModelForCausalLM",
    "import importlib.util, attnres; importlib.util.find_spec('transformers.models.auto.configuration_auto')",
)


@pytest.mark.parametrize("first", ORDERS)
def test_importing_attnres_is_enough_in_any_order(first, tmp_path):
    saved(tmp_path)
    code = (
        f"{first}\nimport transformers\n"
        f"config = transformers.AutoConfig.from_pretrained({str(tmp_path)!r})\n"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        "print(type(config).__name__, type(model).__name__, model.model.residual.strategy.label)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "AttnResLlamaConfig AttnResLlamaForCausalLM Block AttnRes (S=3)"


def test_without_attnres_the_model_is_refused_rather_than_loaded_without_its_residual_path(tmp_path):
    saved(tmp_path)
    code = (
        "import transformers\n"
        f"transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})"
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "model type `attnres` but Transformers does not recognize this architecture" in done.stderr


def test_importing_attnres_does_not_import_transformers_or_torch():
    code = "import sys, attnres; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_config_is_the_familys_with_the_strategy_in_it(tmp_path):
    saved(tmp_path)
    config = config_of(tmp_path)
    assert (config["model_type"], config["base_model_type"]) == ("attnres", "llama")
    assert config["architectures"] == ["AttnResLlamaForCausalLM"]
    assert config["hidden_size"] == 32
    assert config["attnres"] == {
        "type": "BlockAttnRes",
        "sublayers_per_block": 3,
        "num_blocks": None,
        "remainder": "tail",
        "read_scale": "sum",
    }
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.model_type == "llama"
    assert loaded.to_dict()["model_type"] == "attnres"
    assert AutoConfig.for_model(**loaded.to_dict()).attnres == loaded.attnres


def test_sharded_safetensors(tmp_path):
    model = saved(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 3
    assert "model.residual.sites.6.key_weight" in index
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, "auto"])
def test_dtype(dtype, tmp_path):
    saved(tmp_path, learned().to(torch.bfloat16))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    expected = torch.bfloat16 if dtype == "auto" else dtype
    assert {parameter.dtype for parameter in loaded.parameters()} == {expected}
    assert loaded(tokens(1, 4)).logits.dtype == expected


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}], ids=str)
def test_device_map(device_map, tmp_path):
    model, ids = saved(tmp_path), tokens(2, 5)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_layers_offloaded_to_disk(tmp_path):
    model, ids = saved(tmp_path), tokens(2, 5)
    here = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.residual", "model.layers.0")
    places = {**dict.fromkeys(here, "cpu"), "model.layers.1": "disk", "model.layers.2": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offload")
    assert loaded.model.layers[1].mlp.up_proj.weight.is_meta
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_a_residual_path_on_disk_is_refused_and_an_automatic_map_keeps_it_on_the_device(tmp_path):
    model, ids = saved(tmp_path), tokens(2, 5)
    places = {"model.residual": "disk", "model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu",
              "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
    with pytest.raises(CheckpointError, match=r"device_map offloads the residual path \(.*'model.residual': 'disk'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offload")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map="auto", max_memory={"cpu": 60_000}, offload_folder=tmp_path / "offload-2"
    )
    assert "disk" in loaded.hf_device_map.values()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_a_device_map_over_several_devices_is_refused():
    model = learned()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu", "lm_head": "disk"}
    check_placed(model)
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(CheckpointError, match="spreads the layers over 0, 1; allowed is one device"):
        check_placed(model)


def test_a_model_made_on_the_meta_device_has_its_initial_values_when_it_arrives(tmp_path):
    saved(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    for site in model.model.residual.sites:
        assert isinstance(site, DepthSite)
        assert bool((site.pseudo_query == 0).all())
        assert bool((site.key_weight == 1).all())


def test_from_config_starts_anew_with_the_same_strategy(tmp_path):
    saved(tmp_path)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert model.model.residual.strategy == BlockAttnRes(sublayers_per_block=3, read_scale="sum")
    assert isinstance(model.model.layers[0], ResidualDecoderLayer)
    assert all(bool((site.pseudo_query == 0).all()) for site in model.model.residual.sites)


def test_other_heads_find_the_model_too(tmp_path):
    model, ids = saved(tmp_path), tokens(2, 5)
    headless = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(headless(ids).last_hidden_state, model.model(ids).last_hidden_state)
    classifier, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=3, output_loading_info=True
    )
    assert info["missing_keys"] == {"score.weight"}
    assert classifier(ids[:1]).logits.shape == (1, 3)


def rewrite(folder, change):
    """Change the tensors of a saved model."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.residual.sites.2.pseudo_query"), "missing: model.residual.sites.2.pseudo_query"),
        (lambda t: t.update({"model.residual.sites.9.key_weight": torch.ones(32)}), "not in this model: .*sites.9.key"),
    ],
    ids=["missing", "extra"],
)
def test_residual_weights_that_do_not_fit_the_strategy_are_refused(change, message, tmp_path):
    saved(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=f"do not fit the strategy in the config.*{message}"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def edit_config(folder, **changes):
    config = {**config_of(folder), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attnres": {"type": "FullAttnRes", "read_scale": "sum"}, "num_hidden_layers": 2}, CheckpointError, "not in"),
        ({"attnres": {"type": "Nonsense"}}, ConfigError, "attnres is .*Nonsense.*allowed is a dictionary whose type"),
        ({"attnres": {"type": "FullAttnRes", "colour": 3}}, ConfigError, "colour"),
        ({"attnres": ...}, CheckpointError, "names no residual strategy"),
        ({"base_model_type": "nonsense"}, CheckpointError, "base_model_type is 'nonsense'"),
        ({"base_model_type": ...}, CheckpointError, "base_model_type is None"),
    ],
    ids=lambda value: "" if not isinstance(value, dict) else "-".join(value),
)
def test_configs_that_contradict_the_checkpoint_are_refused(changes, error, message, tmp_path):
    saved(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(error, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_class_itself_loads_too_and_refuses_a_plain_checkpoint(tmp_path, recwarn):
    model = saved(tmp_path / "converted")
    loaded = type(model).from_pretrained(tmp_path / "converted")
    assert torch.equal(loaded.model.residual.sites[3].pseudo_query, model.model.residual.sites[3].pseudo_query)
    from attnres import unconvert

    unconvert(loaded, allow_change=True).save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="names no residual strategy"):
        type(model).from_pretrained(tmp_path / "plain")


def test_saved_tensors_have_the_names_the_module_has(tmp_path):
    model = saved(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert {name for name in names if ".residual." in name} == {
        f"model.residual.sites.{site}.{what}" for site in range(7) for what in ("pseudo_query", "key_weight")
    }
    assert names == set(model.state_dict())


def test_loading_half_of_it_by_hand_still_works_for_people_who_know_what_they_do():
    model = learned(strategy=FullAttnRes())
    fresh = learned(strategy=FullAttnRes(), seed=5)
    fresh.load_state_dict(model.state_dict())
    ids = tokens(1, 4)
    assert torch.equal(fresh(ids).logits, model(ids).logits)
    nn.init.zeros_(fresh.model.residual.sites[1].pseudo_query)
    assert not torch.equal(fresh(ids).logits, model(ids).logits)
