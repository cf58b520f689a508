"""flash-linear-attention: its own library's models compute the same under our names, and come back bit for bit."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from attnres.errors import CheckpointError
from attnres.interop import export_checkpoint, import_checkpoint
from attnres.models import build
from attnres.residual import BlockAttnRes, FullAttnRes
from interop import fla_models
from interop.folders import assert_same, files, load, randomise, read_config, read_tensors, write
from models.small import kimi_linear, llama, qwen3

FAMILIES = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True, "num_kv_heads": None},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "norm_eps": 1e-5},
    "mistral": {"window_size": 3},
}
"""Settings of its transformer family by the family of Transformers that computes the same layers."""
KERNELS = {"fuse_norm": False, "fuse_swiglu": False}


def saved(folder, **settings):
    """A model of the library's own, saved by itself."""
    model = fla_models.make(**settings)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_imported_model_computes_what_the_library_does(tmp_path, family, block_size):
    kernels = KERNELS if block_size == 2 else {}
    model = saved(tmp_path / "fla", attnres_block_size=block_size, **FAMILIES[family], **kernels)
    assert import_checkpoint(tmp_path / "fla", tmp_path / "ours") == "fla"
    assert read_config(tmp_path / "ours")["base_model_type"] == family.removesuffix("-tied")
    tokens = torch.randint(3, 96, (2, 9))
    with torch.no_grad():
        actual = load(tmp_path / "ours")(tokens).logits
    torch.testing.assert_close(actual, fla_models.logits(model, tokens), rtol=1e-4, atol=1e-4)


def test_the_comparison_would_notice_another_block_size(tmp_path):
    model = saved(tmp_path / "fla", attnres_block_size=2)
    config = {**read_config(tmp_path / "fla"), "attnres_block_size": 4}
    import_checkpoint(write(tmp_path / "other", config, read_tensors(tmp_path / "fla")), tmp_path / "ours")
    tokens = torch.randint(3, 96, (2, 9))
    with torch.no_grad():
        actual = load(tmp_path / "ours")(tokens).logits
    assert (actual - fla_models.logits(model, tokens)).abs().max() > 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_the_library_comes_back_byte_for_byte(tmp_path, family):
    saved(tmp_path / "fla", attnres_block_size=2, **FAMILIES[family], **KERNELS)
    import_checkpoint(tmp_path / "fla", tmp_path / "ours")
    assert export_checkpoint(tmp_path / "ours", tmp_path / "back") == "fla"
    assert_same(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "fla"))
    assert read_config(tmp_path / "back") == read_config(tmp_path / "fla")
    import_checkpoint(tmp_path / "back", tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "ours")


def test_bfloat16_and_shards_come_back(tmp_path):
    model = fla_models.make(attnres_block_size=1)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "fla", max_shard_size="20KB")
    assert len(list((tmp_path / "fla").glob("*.safetensors"))) > 1
    import_checkpoint(tmp_path / "fla", tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    assert_same(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "fla"))
    assert read_config(tmp_path / "ours")["dtype"] == "bfloat16"


STRATEGIES = {
    "full": (FullAttnRes(), 1),
    "block": (BlockAttnRes(sublayers_per_block=4), 4),
    "number": (BlockAttnRes(num_blocks=3), 2),
    "one": (BlockAttnRes(sublayers_per_block=100), 100),
}


@pytest.mark.parametrize("config", [llama(), qwen3(rms_norm_eps=1e-5)], ids=lambda config: config.model_type)
@pytest.mark.parametrize(("strategy", "block_size"), STRATEGIES.values(), ids=STRATEGIES)
def test_the_library_loads_what_is_exported_and_computes_the_same(tmp_path, config, strategy, block_size):
    model = randomise(build(config, strategy)).eval()
    model.save_pretrained(tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "fla", kind="fla")
    exported = read_config(tmp_path / "fla")
    assert exported["attnres_block_size"] == block_size
    ignored = ("architectures", "model_type", "dtype")
    theirs = fla_models.make(**{name: value for name, value in exported.items() if name not in ignored})
    theirs.load_state_dict(read_tensors(tmp_path / "fla"), strict=True)
    tokens = torch.randint(3, 96, (2, 9))
    with torch.no_grad():
        expected = model(tokens).logits
    torch.testing.assert_close(fla_models.logits(theirs, tokens), expected, rtol=1e-4, atol=1e-4)


def test_transformers_loads_an_imported_folder_and_what_it_saves_is_exported(tmp_path):
    saved(tmp_path / "fla", attnres_block_size=2, **KERNELS)
    import_checkpoint(tmp_path / "fla", tmp_path / "ours")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    tokens = torch.randint(3, 96, (1, 6))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, load(tmp_path / "ours")(tokens).logits)
    randomise(model).save_pretrained(tmp_path / "trained")
    export_checkpoint(tmp_path / "trained", tmp_path / "back")
    exported = read_config(tmp_path / "back")
    assert exported == read_config(tmp_path / "fla")
    theirs = fla_models.make(**{n: v for n, v in exported.items() if n not in ("architectures", "model_type", "dtype")})
    theirs.load_state_dict(read_tensors(tmp_path / "back"), strict=True)
    with torch.no_grad():
        expected = model(tokens).logits
    torch.testing.assert_close(fla_models.logits(theirs, tokens), expected, rtol=1e-4, atol=1e-4)


def test_kernel_choices_stay_when_the_model_has_changed(tmp_path):
    saved(tmp_path / "fla", attnres_block_size=2, **KERNELS)
    import_checkpoint(tmp_path / "fla", tmp_path / "imported")
    config = {**read_config(tmp_path / "imported"), "rms_norm_eps": 1e-4}
    ours = write(tmp_path / "ours", config, read_tensors(tmp_path / "imported"))
    export_checkpoint(ours, tmp_path / "back")
    exported = read_config(tmp_path / "back")
    assert (exported["norm_eps"], exported["fuse_norm"], exported["fuse_swiglu"]) == (1e-4, False, False)


def test_a_width_that_follows_from_a_ratio(tmp_path):
    model = saved(tmp_path / "fla", attnres_block_size=2, intermediate_size=None, hidden_ratio=3, hidden_size=64)
    import_checkpoint(tmp_path / "fla", tmp_path / "ours")
    assert read_config(tmp_path / "ours")["intermediate_size"] == model.model.layers[0].mlp.intermediate_size
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    assert read_config(tmp_path / "back")["intermediate_size"] is None


WRONG = {
    "plain": ({"attnres_block_size": None}, "attnres_block_size is None, so the model has a plain residual"),
    "zero": ({"attnres_block_size": 0}, "attnres_block_size is 0"),
    "odd": ({"attnres_block_size": 3}, r"blocks of 3 sublayers; .* has 1 \(Full\) and even numbers"),
    "family": ({"model_type": "gla"}, "model_type is 'gla'; allowed is 'transformer'"),
    "activation": ({"hidden_act": "powlu"}, "hidden_act='powlu'"),
    "eps": ({"qk_norm": True}, r"norm_eps=1e-06 \(with qk_norm, Qwen3 has one eps"),
    "together": ({"qkv_bias": True, "window_size": 3}, "qkv_bias=True and window_size=3"),
    "window": ({"window_size": 0}, "window_size is 0; allowed is a whole number of 1 or more"),
    "word": ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; allowed is true or false"),
    "unrotated": ({"rope_theta": None}, "rope_theta=None"),
    "heads": ({"num_heads": 5}, "num_heads 5"),
    "depth": ({"num_hidden_layers": 4}, "missing: model.layers.3.attn.q_proj.weight"),
    "short": ({"num_hidden_layers": 2}, "not in the model: model.layers.2.attn.k_proj.weight"),
    "width": ({"intermediate_size": 50}, r"mlp\.down_proj\.weight \[32, 48\] instead of \[32, 50\]"),
    "words": ({"vocab_size": 95}, r"model\.embeddings\.weight \[96, 32\] instead of \[95, 32\]"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings is true, but lm_head.weight and"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("fla") / "fla"
    saved(folder, attnres_block_size=2)
    return folder


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_what_has_no_counterpart_or_contradicts_is_refused_by_name(tmp_path, checkpoint, changes, message):
    source = write(tmp_path / "fla", {**read_config(checkpoint), **changes}, read_tensors(checkpoint))
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_an_untied_model_without_a_head_is_refused(tmp_path, checkpoint):
    tensors = read_tensors(checkpoint)
    del tensors["lm_head.weight"]
    source = write(tmp_path / "fla", read_config(checkpoint), tensors)
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        import_checkpoint(source, tmp_path / "ours")


EXPORTS = {
    "family": (kimi_linear(), FullAttnRes(), "the base is 'kimi_linear'"),
    "bias": (llama(attention_bias=True), FullAttnRes(), "attention_bias=True"),
    "scaled": (
        llama(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}),
        FullAttnRes(),
        "rope_parameters=",
    ),
    "head": (llama(head_dim=16), FullAttnRes(), "head_dim=16"),
    "eps": (qwen3(), FullAttnRes(), "rms_norm_eps=1e-06"),
    "activation": (llama(hidden_act="gelu"), FullAttnRes(), "hidden_act='gelu'"),
    "odd": (llama(), BlockAttnRes(sublayers_per_block=3), "blocks of 3 sublayers"),
    "sum": (llama(), FullAttnRes(read_scale="sum"), "read_scale is 'sum'"),
}


@pytest.mark.parametrize(("config", "strategy", "message"), EXPORTS.values(), ids=EXPORTS)
def test_what_the_library_does_not_have_is_not_exported(tmp_path, config, strategy, message):
    build(config, strategy).save_pretrained(tmp_path / "ours")
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(tmp_path / "ours", tmp_path / "fla", kind="fla")
    assert not (tmp_path / "fla").exists()
