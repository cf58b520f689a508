"""Kimi K3's names: round trips bit for bit, the function as published, and what is refused."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, KimiLinearForCausalLM
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask

from attnres.errors import CheckpointError
from attnres.interop import export_checkpoint, import_checkpoint, load_residual
from interop.folders import assert_same, files, load, randomise, read_config, read_tensors, write
from models.small import kimi_linear

LAYERS, DIM, BLOCK = 5, 32, 2


def depth_tensors(layers=LAYERS, dim=DIM, dtype=torch.bfloat16):
    """The residual parameters of the text model, as the release names and shapes them."""
    stems = [f"model.layers.{i}.{half}_res" for i in range(layers) for half in ("self_attention", "mlp")]
    tensors = {}
    for stem in [*stems, "model.output_attn_res"]:
        tensors[f"{stem}_proj.weight"] = torch.randn(1, dim).to(dtype)
        tensors[f"{stem}_norm.weight"] = (1 + 0.3 * torch.randn(dim)).to(dtype)
    return tensors


def text_config(**changes):
    config = {**kimi_linear(LAYERS).to_dict(), "architectures": ["KimiLinearForCausalLM"]}
    return {**config, "attn_res_block_size": BLOCK, **changes}


def text_model(tmp_path, name="k3", *, dtype=torch.bfloat16, shards=1, config=None, change=None):
    """A small random checkpoint, and the plain Kimi Linear that it is built on."""
    base = KimiLinearForCausalLM(kimi_linear(LAYERS)).eval()
    tensors = {**base.state_dict(), **depth_tensors(dtype=dtype)}
    if change is not None:
        change(tensors)
    return write(tmp_path / name, config or text_config(), tensors, shards=shards), base


def wrapped(tmp_path, *, extra=None, **changes):
    """A multimodal checkpoint: the text config inside another, and a prefix on every name."""
    tensors = {**KimiLinearForCausalLM(kimi_linear(LAYERS)).state_dict(), **depth_tensors()}
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    config = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "media_token": 7}
    config |= {
        "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config"},
        "text_config": text_config(),
        **changes,
    }
    return write(tmp_path / "wrapped", config, {**named, **(extra or {})}, shards=3)


@pytest.mark.parametrize("shards", [1, 4])
def test_kimi_k3_comes_back_byte_for_byte(tmp_path, shards):
    source, _ = text_model(tmp_path, shards=shards)
    assert import_checkpoint(source, tmp_path / "ours") == "kimi-k3"
    assert export_checkpoint(tmp_path / "ours", tmp_path / "back") == "kimi-k3"
    assert_same(read_tensors(tmp_path / "back"), read_tensors(source))
    assert read_config(tmp_path / "back") == read_config(source)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) == shards


def test_ours_comes_back_byte_for_byte_from_kimi_k3(tmp_path):
    source, _ = text_model(tmp_path)
    import_checkpoint(source, tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "there")
    import_checkpoint(tmp_path / "there", tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "ours")


def test_a_model_that_was_never_kimi_k3_goes_there_and_back(tmp_path):
    import_checkpoint(text_model(tmp_path)[0], tmp_path / "imported")
    config = read_config(tmp_path / "imported")
    del config["imported_from"]
    ours = write(tmp_path / "ours", config, read_tensors(tmp_path / "imported"))
    with pytest.raises(CheckpointError, match="not imported"):
        export_checkpoint(ours, tmp_path / "there")
    export_checkpoint(ours, tmp_path / "there", kind="kimi-k3")
    assert read_config(tmp_path / "there")["attn_res_block_size"] == BLOCK
    import_checkpoint(tmp_path / "there", tmp_path / "again")
    assert_same(read_tensors(tmp_path / "again"), read_tensors(ours))
    assert read_config(tmp_path / "again")["attnres"] == config["attnres"]


def test_the_wrapper_of_a_multimodal_checkpoint_comes_back(tmp_path):
    source = wrapped(tmp_path)
    import_checkpoint(source, tmp_path / "ours")
    assert not any(name.startswith("language_model.") for name in read_tensors(tmp_path / "ours"))
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    assert_same(read_tensors(tmp_path / "back"), read_tensors(source))
    config = read_config(source)
    del config["auto_map"]  # it names code
    assert read_config(tmp_path / "back") == config


def test_other_parts_of_a_multimodal_checkpoint_are_left_out_only_when_told(tmp_path):
    source = wrapped(tmp_path, extra={"vision_tower.patch.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"text_only.*vision_tower\.patch\.weight"):
        import_checkpoint(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    import_checkpoint(source, tmp_path / "ours", text_only=True)
    assert "model.residual.sites.0.pseudo_query" in read_tensors(tmp_path / "ours")


@pytest.mark.parametrize("shape", [(DIM,), (1, DIM), (DIM, 1)], ids=str)
def test_every_shape_of_a_query_is_taken_and_one_is_given(tmp_path, shape):
    def reshape(tensors):
        for name in [name for name in tensors if name.endswith("_res_proj.weight")]:
            tensors[name] = tensors[name].reshape(shape)

    source, _ = text_model(tmp_path, change=reshape)
    import_checkpoint(source, tmp_path / "ours")
    assert read_tensors(tmp_path / "ours")["model.residual.sites.3.pseudo_query"].shape == (DIM,)
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    queries = {name: t for name, t in read_tensors(tmp_path / "back").items() if name.endswith("_res_proj.weight")}
    assert {tensor.shape for tensor in queries.values()} == {(1, DIM)}
    assert_same(
        {name: t.flatten() for name, t in queries.items()}, {n: read_tensors(source)[n].flatten() for n in queries}
    )


def test_a_block_of_layers_is_twice_as_many_sublayers(tmp_path):
    source, _ = text_model(tmp_path)
    import_checkpoint(source, tmp_path / "ours")
    config = read_config(tmp_path / "ours")
    assert config["attnres"] == {
        "type": "BlockAttnRes",
        "read_scale": "mean",
        "sublayers_per_block": 2 * BLOCK,
        "num_blocks": None,
        "remainder": "tail",
    }
    assert (config["model_type"], config["base_model_type"]) == ("attnres", "kimi_linear")
    assert config["architectures"] == ["AttnResKimiLinearForCausalLM"]
    assert "attn_res_block_size" not in config


def attention_residual(prefix_sum, block_residual, query, weight, eps):
    """The published read: snapshots first, the running sum last, all in float32."""
    values = torch.stack([*block_residual, prefix_sum], dim=-2).float()
    keys = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    scores = (keys * (weight.float() * query.float().flatten())).sum(-1)
    return (scores.softmax(-1)[..., None] * values).sum(-2).to(prefix_sum.dtype)


def published_logits(base, depth, tokens, block):
    """The published forward pass of the text model, over Transformers' attention, MLP and norms."""
    model, eps = base.model, base.config.rms_norm_eps
    hidden = model.embed_tokens(tokens)
    arguments = {"config": model.config, "inputs_embeds": hidden, "attention_mask": None, "cache": None}
    positions = torch.arange(tokens.shape[1])[None]
    causal = create_causal_mask(**arguments, position_ids=positions)
    recurrent = create_recurrent_attention_mask(**arguments, position_ids=positions)

    def mix(prefix_sum, snapshots, name):
        return attention_residual(
            prefix_sum, snapshots, depth[f"{name}_proj.weight"], depth[f"{name}_norm.weight"], eps
        )

    prefix_sum, snapshots = hidden, []
    for index, layer in enumerate(model.layers):
        name = f"model.layers.{index}"
        read = mix(prefix_sum, snapshots, f"{name}.self_attention_res") if snapshots else prefix_sum
        if index % block == 0:
            snapshots, prefix_sum = [*snapshots, prefix_sum], None
        normed = layer.input_layernorm(read)
        if layer.block_type == "linear_attention":
            attended = layer.self_attn(hidden_states=normed, attention_mask=recurrent, cache=None)
        else:
            attended, _ = layer.self_attn(
                hidden_states=normed, attention_mask=causal, position_ids=positions, cache=None, use_cache=False
            )
        prefix_sum = attended if prefix_sum is None else prefix_sum + attended
        read = mix(prefix_sum, snapshots, f"{name}.mlp_res")
        prefix_sum = prefix_sum + layer.mlp(layer.post_attention_layernorm(read))
    return base.lm_head(model.norm(mix(prefix_sum, snapshots, "model.output_attn_res")))


@pytest.mark.parametrize("block", [1, 2, 3, 9])
def test_an_imported_model_computes_what_kimi_k3_publishes(tmp_path, block):
    source, base = text_model(tmp_path, dtype=torch.float32, config=text_config(attn_res_block_size=block))
    import_checkpoint(source, tmp_path / "ours")
    tokens = torch.randint(3, 96, (2, 11))
    with torch.no_grad():
        expected = published_logits(base, read_tensors(source), tokens, block)
        other = published_logits(base, read_tensors(source), tokens, block + 1 if block < 5 else 2)
        actual = load(tmp_path / "ours")(tokens, use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert (other - expected).abs().max() > 0.05  # another block size would be noticed


def test_names_of_the_base_on_disk_pass_through(tmp_path):
    """Transformers itself saves Kimi Linear under other names than its modules have."""
    KimiLinearForCausalLM(kimi_linear(LAYERS)).save_pretrained(tmp_path / "plain")
    tensors = {**read_tensors(tmp_path / "plain"), **depth_tensors()}
    assert any("block_sparse_moe" in name for name in tensors)
    source = write(tmp_path / "k3", {**read_config(tmp_path / "plain"), "attn_res_block_size": BLOCK}, tensors)
    import_checkpoint(source, tmp_path / "ours")
    ours = read_tensors(tmp_path / "ours")
    assert all(name in ours for name in read_tensors(tmp_path / "plain"))
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    assert_same(read_tensors(tmp_path / "back"), tensors)


def test_a_quantised_base_passes_through(tmp_path):
    packed = torch.randint(0, 255, (4, 6), dtype=torch.uint8)
    scale = torch.randn(4, 2).to(torch.float8_e4m3fn)

    def quantise(tensors):
        tensors["model.layers.1.mlp.experts.0.w1.weight_packed"] = packed
        tensors["model.layers.1.mlp.experts.0.w1.weight_scale"] = scale

    source, _ = text_model(tmp_path, change=quantise, shards=2)
    import_checkpoint(source, tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    assert_same(read_tensors(tmp_path / "back"), read_tensors(source))


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


FIRST = "model.layers.0.self_attention_res_proj.weight"
WRONG_TENSORS = {
    "missing": (
        drop(FIRST, "model.output_attn_res_norm.weight"),
        rf"missing: {FIRST}, model\.output_attn_res_norm\.weight",
    ),
    "all-missing": (lambda tensors: [tensors.pop(n) for n in list(tensors) if "_res_" in n], "missing: "),
    "extra": (
        put("model.layers.9.mlp_res_proj.weight", torch.ones(1, DIM)),
        r"not in the model: model\.layers\.9\.mlp_res",
    ),
    "bias": (
        put("model.layers.1.mlp_res_proj.bias", torch.ones(1)),
        r"not in the model: model\.layers\.1\.mlp_res_proj\.bias",
    ),
    "shape": (
        put(FIRST, torch.ones(2, DIM)),
        r"of another shape: .*\[2, 32\] instead of \[1, 32\] or \[32\] or \[32, 1\]",
    ),
    "integer": (put(FIRST, torch.ones(1, DIM, dtype=torch.int8)), rf"not of F64, F32, F16, BF16: {FIRST} I8"),
    "ours": (put("model.residual.sites.0.pseudo_query", torch.ones(DIM)), "under names of attnres"),
    "base": (drop("model.norm.weight", "lm_head.weight"), r"missing: lm_head\.weight, model\.norm\.weight"),
    "base-layer": (
        lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith("model.layers.3.self_attn.")],
        r"missing: model\.layers\.3\.self_attn\.\*",
    ),
    "layer-more": (put("model.layers.5.mlp.up_proj.weight", torch.ones(1)), r"not in the model: model\.layers\.5\.mlp"),
}


@pytest.mark.parametrize(("change", "message"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_wrong_tensors_are_refused_with_their_names(tmp_path, change, message):
    source, _ = text_model(tmp_path, change=change)
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


WRONG_CONFIGS = {
    "null": ({"attn_res_block_size": None}, "plain residual"),
    "zero": ({"attn_res_block_size": 0}, "attn_res_block_size is 0"),
    "fraction": ({"attn_res_block_size": 1.5}, "attn_res_block_size is 1.5"),
    "flag": ({"attn_res_block_size": True}, "attn_res_block_size is True"),
    "another-model": ({"model_type": "llama"}, "model_type is 'llama' with attn_res_block_size"),
    "both": ({"attnres_block_size": 4}, "at once of kimi-k3 and fla"),
    "output-gate": ({"mla_use_output_gate": True}, "mla_use_output_gate=True"),
    "activation": ({"hidden_act": "situ", "activation_situ_beta": 4.0}, "hidden_act='situ', activation_situ_beta=4.0"),
    "streams": ({"hc_mult": 4}, "hc_mult=4"),
    "full-rank-gate": ({"linear_attn_config": {"use_full_rank_gate": True}}, "linear_attn_config.use_full_rank_gate"),
    "depth": ({"num_hidden_layers": 6}, "missing: model.layers.5"),
    "width": ({"hidden_size": 64}, "of another shape"),
    "type": ({"rms_norm_eps": "small"}, "rms_norm_eps"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG_CONFIGS.values(), ids=WRONG_CONFIGS)
def test_a_config_that_contradicts_or_has_no_counterpart_is_refused(tmp_path, changes, message):
    source, _ = text_model(tmp_path, config=text_config(**changes))
    with pytest.raises(CheckpointError, match=message) as caught:
        import_checkpoint(source, tmp_path / "ours")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ours").exists()


def test_two_block_sizes_that_differ_are_refused(tmp_path):
    source = wrapped(tmp_path, attn_res_block_size=12)
    with pytest.raises(CheckpointError, match=r"attn_res_block_size is 12 and text_config\.attn_res_block_size is 2"):
        import_checkpoint(source, tmp_path / "ours")


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_quantised_multimodal_checkpoint_is_refused(tmp_path, where):
    """The settings name modules, under names that an import takes away."""
    settings = {"quantization_config": {"quant_method": "compressed-tensors", "ignore": ["language_model.lm_head"]}}
    source = wrapped(tmp_path, **({"text_config": text_config(**settings)} if where == "inside" else settings))
    with pytest.raises(CheckpointError, match="quantization_config names modules of the multimodal model"):
        import_checkpoint(source, tmp_path / "ours")


WRONG_EXPORTS = {
    "odd": ({"sublayers_per_block": 3}, "blocks of 3 sublayers"),
    "full": ({"type": "FullAttnRes", "read_scale": "mean"}, "blocks of 1 sublayers"),
    "sum": ({"read_scale": "sum"}, "read_scale is 'sum'"),
    "balanced": ({"sublayers_per_block": None, "num_blocks": 3, "remainder": "balanced"}, "blocks end after"),
    "strategy": ({"type": "GatedAttnRes", "read_scale": "mean"}, "Full and Block AttnRes"),
    "unknown": ({"type": "Nonsense"}, "allowed is"),
}


@pytest.mark.parametrize(("strategy", "message"), WRONG_EXPORTS.values(), ids=WRONG_EXPORTS)
def test_a_strategy_that_kimi_k3_does_not_have_is_not_exported(tmp_path, strategy, message):
    import_checkpoint(text_model(tmp_path)[0], tmp_path / "imported")
    config = read_config(tmp_path / "imported")
    config["attnres"] = strategy if set(strategy) >= {"type"} else {**config["attnres"], **strategy}
    ours = write(tmp_path / "ours", config, read_tensors(tmp_path / "imported"))
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(ours, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_blocks_given_by_their_number_are_exported_as_layers(tmp_path):
    import_checkpoint(text_model(tmp_path)[0], tmp_path / "imported")
    config = read_config(tmp_path / "imported")
    config["attnres"] |= {"sublayers_per_block": None, "num_blocks": 3}
    export_checkpoint(write(tmp_path / "ours", config, read_tensors(tmp_path / "imported")), tmp_path / "back")
    assert read_config(tmp_path / "back")["attn_res_block_size"] == 2  # 10 sublayers in blocks of 4, 4 and 2


def test_the_residual_path_is_loaded_by_itself(tmp_path):
    source, _ = text_model(tmp_path, shards=3)
    import_checkpoint(source, tmp_path / "ours")
    residual = load_residual(tmp_path / "ours")
    assert residual.num_sublayers == 2 * LAYERS
    assert residual.sites[4].eps == kimi_linear().rms_norm_eps
    expected = read_tensors(source)["model.layers.2.self_attention_res_proj.weight"][0]
    assert torch.equal(residual.sites[4].pseudo_query, expected)
    assert residual.sites[4].pseudo_query.dtype == torch.bfloat16


def test_transformers_loads_an_imported_folder(tmp_path):
    KimiLinearForCausalLM(kimi_linear(LAYERS)).save_pretrained(tmp_path / "plain")
    tensors = {**read_tensors(tmp_path / "plain"), **depth_tensors(dtype=torch.float32)}
    source = write(tmp_path / "k3", {**read_config(tmp_path / "plain"), "attn_res_block_size": BLOCK}, tensors)
    import_checkpoint(source, tmp_path / "ours")
    base = KimiLinearForCausalLM.from_pretrained(tmp_path / "plain").eval()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.randint(3, 96, (1, 7))
    with torch.no_grad():
        expected = published_logits(base, tensors, tokens, BLOCK)
        torch.testing.assert_close(model(tokens, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


def test_what_transformers_saves_after_an_import_is_exported(tmp_path):
    KimiLinearForCausalLM(kimi_linear(LAYERS)).save_pretrained(tmp_path / "plain")
    tensors = {**read_tensors(tmp_path / "plain"), **depth_tensors(dtype=torch.float32)}
    source = write(tmp_path / "k3", {**read_config(tmp_path / "plain"), "attn_res_block_size": BLOCK}, tensors)
    import_checkpoint(source, tmp_path / "ours")
    randomise(AutoModelForCausalLM.from_pretrained(tmp_path / "ours")).save_pretrained(tmp_path / "trained")
    export_checkpoint(tmp_path / "trained", tmp_path / "back")
    back = read_tensors(tmp_path / "back")
    assert back.keys() == tensors.keys()
    assert not torch.equal(back["model.output_attn_res_proj.weight"], tensors["model.output_attn_res_proj.weight"])
    assert_same(
        {n: t for n, t in back.items() if "_res_" not in n}, {n: t for n, t in tensors.items() if "_res_" not in n}
    )
    assert json.loads((tmp_path / "back" / "config.json").read_text())["attn_res_block_size"] == BLOCK
