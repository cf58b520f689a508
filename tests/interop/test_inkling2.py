"""Inkling-2: the library's own model, its reads against ours with imported parameters, and round trips."""

import pytest
import torch
from transformers import Inkling2ForCausalLM, Inkling2TextConfig
from transformers.models.inkling2.modeling_inkling2 import Inkling2BlockAttentionResidual

from attnres.errors import CheckpointError
from attnres.interop import export_checkpoint, import_checkpoint, load_residual
from attnres.residual.state import History
from interop.folders import assert_same, files, read_config, read_tensors, write

MIXED = ("hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid_sliding", "hybrid")
FULL, SLIDING = ("hybrid",) * 4, ("hybrid_sliding",) * 4
KINDS = {"mixed": MIXED, "full": FULL, "sliding": SLIDING, "full-first": ("hybrid", "hybrid_sliding", "hybrid_sliding")}


def make(layer_types=MIXED, *, layers_per_block=2, **changes):
    """A small random text model whose reads matter."""
    sizes = {"vocab_size": 32, "unpadded_vocab_size": 30, "hidden_size": 16, "moe_intermediate_size": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "d_rel": 2, "rel_extent": 4}
    sizes |= {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 8, "sliding_window_size": 4}
    sizes |= {"n_routed_experts": 2, "num_experts_per_tok": 1, "eos_token_id": 3, "initializer_range": 0.2}
    config = Inkling2TextConfig(
        num_hidden_layers=len(layer_types),
        layer_types=list(layer_types),
        n_layers_per_attn_res_block=layers_per_block,
        **{**sizes, **changes},
    )
    model = Inkling2ForCausalLM(config).eval()
    for module in model.modules():
        if isinstance(module, Inkling2BlockAttentionResidual):
            torch.nn.init.normal_(module.query, std=2.0)
    return model


def saved(folder, layer_types=MIXED, **settings):
    """A folder as Transformers writes it, under the names of the release."""
    model = make(layer_types, **settings)
    model.save_pretrained(folder)
    return model


def module_names(folder, layer_types=MIXED):
    """A folder under the names of the modules."""
    model = make(layer_types)
    config = {**model.config.to_dict(), "architectures": ["Inkling2ForCausalLM"]}
    return write(folder, config, model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_comes_back_byte_for_byte(tmp_path, kind):
    saved(tmp_path / "inkling", KINDS[kind])
    assert import_checkpoint(tmp_path / "inkling", tmp_path / "ours") == "inkling2"
    assert export_checkpoint(tmp_path / "ours", tmp_path / "back") == "inkling2"
    assert_same(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "inkling"))
    assert read_config(tmp_path / "back") == read_config(tmp_path / "inkling")
    import_checkpoint(tmp_path / "back", tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "ours")


def test_names_of_modules_come_back_too(tmp_path):
    source = module_names(tmp_path / "inkling")
    import_checkpoint(source, tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    assert_same(read_tensors(tmp_path / "back"), read_tensors(source))


def test_both_namings_give_the_same_reads(tmp_path):
    torch.manual_seed(1)
    saved(tmp_path / "released")
    torch.manual_seed(1)
    module_names(tmp_path / "modules")
    for name in ("released", "modules"):
        import_checkpoint(tmp_path / name, tmp_path / f"{name}-ours")
    first, second = (load_residual(tmp_path / f"{name}-ours").state_dict() for name in ("released", "modules"))
    assert_same(first, second)


def test_the_library_loads_what_comes_back(tmp_path):
    saved(tmp_path / "inkling")
    import_checkpoint(tmp_path / "inkling", tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    before = Inkling2ForCausalLM.from_pretrained(tmp_path / "inkling")
    again, info = Inkling2ForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same(again.state_dict(), before.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_every_read_of_a_running_model_equals_ours(tmp_path, kind):
    """The library's model runs, and at each of its reads ours gets the same sources."""
    model = saved(tmp_path / "inkling", KINDS[kind])
    import_checkpoint(tmp_path / "inkling", tmp_path / "ours")
    residual = load_residual(tmp_path / "ours")
    seen = {}
    for name, module in model.model.named_modules():
        if isinstance(module, Inkling2BlockAttentionResidual):
            module.register_forward_hook(lambda _, given, output, name=name: seen.update({name: (given, output)}))
    with torch.no_grad():
        model(torch.randint(4, 30, (2, 7)))
    assert len(seen) == 2 * len(KINDS[kind])  # all but the first attention, and the output
    for name, ((blocks, partial), outputs) in seen.items():
        site = site_of(name, len(KINDS[kind]))
        with torch.no_grad():
            actual = residual.read(History(tuple(blocks.unbind(-2)), partial), site)
        reads = actual.unbind(-2) if residual.site(site).views > 1 else (actual,)
        for index, read in enumerate(reads):
            expected = outputs[index] if len(outputs) > 1 else outputs[0]
            torch.testing.assert_close(read, expected, rtol=1e-5, atol=1e-5)


def site_of(name, layers):
    if name == "final_input":
        return 2 * layers
    _, layer, which = name.split(".")
    return 2 * int(layer) + {"attention_input": 0, "mlp_input": 1}[which]


@pytest.mark.parametrize("layers_per_block", [1, 2, 3, 7])
def test_the_schedule_is_that_of_the_running_model(tmp_path, layers_per_block):
    """Blocks are counted in layers there and in sublayers here; each read sees as many sources."""
    model = saved(tmp_path / "inkling", layers_per_block=layers_per_block)
    import_checkpoint(tmp_path / "inkling", tmp_path / "ours")
    residual = load_residual(tmp_path / "ours")
    assert residual.strategy.sublayers_per_block == 2 * layers_per_block
    seen = {}
    for name, module in model.model.named_modules():
        if isinstance(module, Inkling2BlockAttentionResidual):
            module.register_forward_hook(lambda _, given, __, name=name: seen.update({name: given[0].shape[-2] + 1}))
    with torch.no_grad():
        model(torch.randint(4, 30, (1, 3)))
    for name, sources in seen.items():
        assert len(residual.strategy.sources(site_of(name, 5), 10)) == sources, name


def change_tensors(folder, source, change):
    tensors = read_tensors(source)
    change(tensors)
    return write(folder, read_config(source), tensors)


QUERY = "model.llm.attn_res.mlp_queries.0"
WRONG = {
    "missing": (lambda t: t.pop(QUERY), r"missing: model\.llm\.attn_res\.mlp_queries\.0"),
    "extra": (
        lambda t: t.update({"model.llm.attn_res.mlp_queries.7": torch.ones(16)}),
        r"not in the model: .*queries\.7",
    ),
    "one-for-three": (
        lambda t: t.update({"model.llm.attn_res.attn_queries.0": torch.ones(16)}),
        r"\[16\] instead of \[3, 16\]",
    ),
    "three-for-one": (lambda t: t.update({QUERY: torch.ones(3, 16)}), r"\[3, 16\] instead of \[16\]"),
    "integer": (lambda t: t.update({QUERY: torch.ones(16, dtype=torch.int8)}), "not of F64, F32, F16, BF16"),
    "both-names": (
        lambda t: t.update({"model.final_input.query": torch.ones(16)}),
        "not in the model: model.final_input.query",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_wrong_tensors_are_refused_with_their_names(tmp_path, change, message):
    saved(tmp_path / "inkling")
    source = change_tensors(tmp_path / "wrong", tmp_path / "inkling", change)
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


CONFIGS = {
    "loop": ({"model_type": "inkling2_loop_text"}, "model_type is 'inkling2_loop_text'; allowed is 'inkling2_text'"),
    "null": ({"n_layers_per_attn_res_block": None}, "n_layers_per_attn_res_block is None"),
    "kinds": ({"layer_types": ["hybrid"] * 3}, "allowed is a list of 5 words out of hybrid, hybrid_sliding"),
    "word": ({"layer_types": ["full"] * 5}, "allowed is a list of 5 words"),
    "other-kinds": ({"layer_types": ["hybrid"] * 5}, r"attn_queries\.1 \[16\] instead of \[3, 16\]"),
}


@pytest.mark.parametrize(("changes", "message"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_contradicts_is_refused(tmp_path, changes, message):
    saved(tmp_path / "inkling")
    config = {**read_config(tmp_path / "inkling"), **changes}
    source = write(tmp_path / "wrong", config, read_tensors(tmp_path / "inkling"))
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(source, tmp_path / "ours")


def test_three_reads_that_differ_are_not_written_as_one(tmp_path):
    saved(tmp_path / "inkling")
    import_checkpoint(tmp_path / "inkling", tmp_path / "ours")
    tensors = read_tensors(tmp_path / "ours")
    tensors["model.residual.sites.4.pseudo_query"][1, 0] += 1.0  # layer 2 slides
    source = write(tmp_path / "trained", read_config(tmp_path / "ours"), tensors)
    with pytest.raises(
        CheckpointError, match=r"rows that differ: model\.residual\.sites\.4\.pseudo_query \(its 3 reads"
    ):
        export_checkpoint(source, tmp_path / "back")


def test_a_strategy_that_is_not_that_of_the_base_is_not_exported(tmp_path):
    saved(tmp_path / "inkling")
    import_checkpoint(tmp_path / "inkling", tmp_path / "ours")
    config = read_config(tmp_path / "ours")
    config["attnres"]["sublayers_per_block"] = 6
    source = write(tmp_path / "changed", config, read_tensors(tmp_path / "ours"))
    with pytest.raises(
        CheckpointError, match=r"\(6, 'qkv', 'mean'\); the base's own fields ask for \(4, 'qkv', 'mean'\)"
    ):
        export_checkpoint(source, tmp_path / "back")
