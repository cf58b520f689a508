"""`attnres convert` and `unconvert`: what they write, what they print, and what they refuse."""

import errno
import json
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from attnres.cli import main
from attnres.interop.folder import open_folder
from attnres.interop.stored import same_bytes
from ecosystem.checkpoints import config_of, learned, saved, tokenizer
from models.small import ALL_CONFIGS, make


def plain(folder: Path, family="llama", *, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = make(family).to(dtype)
    model.save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    return model


def run(capsys, *arguments):
    main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("attnres: error: ")]
    assert len(lines) == 1, error
    return lines[0]


BLOCK = ("--residual", "block", "--residual.sublayers-per-block", "3")


@pytest.mark.parametrize("family", ALL_CONFIGS)
def test_there_and_back_again_is_byte_equal(family, tmp_path, capsys):
    plain(tmp_path / "a", family)
    numbers = json.loads(run(capsys, "convert", tmp_path / "a", tmp_path / "b", *BLOCK, "--json"))
    assert numbers["lossless"]
    assert numbers["relative_difference"] < 1e-5
    assert numbers["perplexity_after"] == pytest.approx(numbers["perplexity_before"], rel=1e-5)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert all(bool((site.pseudo_query == 0).all()) for site in loaded.base_model.residual.sites)
    back = json.loads(run(capsys, "unconvert", tmp_path / "b", tmp_path / "c", "--json"))
    assert back["lossless"]
    first, last = open_folder(tmp_path / "a"), open_folder(tmp_path / "c")
    assert dict(first.config) == dict(last.config)
    assert set(first.tensors) == set(last.tensors)
    assert all(same_bytes(tensor, last.tensors[name]) for name, tensor in first.tensors.items())


def test_what_is_printed(tmp_path, capsys):
    plain(tmp_path / "a")
    printed = run(capsys, "convert", tmp_path / "a", tmp_path / "b", *BLOCK)
    assert "b: AttnResLlamaForCausalLM, 3 layers; Block AttnRes (S=3) put in: 7 sites, 448 parameters" in printed
    assert "relative; the same to rounding)" in printed
    assert "largest logit difference" in printed
    assert "(512 tokens)" in printed
    before, after = printed.split("perplexity")[1].split(" before, ")
    assert float(before) == pytest.approx(float(after.split(" after")[0]), rel=1e-4)


def test_sharded_bfloat16_checkpoints_keep_their_shards_and_bytes(tmp_path, capsys):
    plain(tmp_path / "a", dtype=torch.bfloat16, max_shard_size="15KB")
    assert "the same to rounding" in run(capsys, "convert", tmp_path / "a", tmp_path / "b", *BLOCK)
    first, second = open_folder(tmp_path / "a"), open_folder(tmp_path / "b")
    added = set(second.tensors) - set(first.tensors)
    assert len(added) == 14
    assert {second.tensors[name].dtype for name in added} == {"BF16"}
    assert {tensor.file.name for tensor in first.tensors.values()} == {t.file.name for t in second.tensors.values()}
    assert all(same_bytes(tensor, second.tensors[name]) for name, tensor in first.tensors.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}


def test_the_tokenizer_goes_along_and_greedy_text_is_the_same(tmp_path, capsys):
    model = plain(tmp_path / "a")
    run(capsys, "convert", tmp_path / "a", tmp_path / "b", "--residual", "full")
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "b"), torch.randint(3, 96, (1, 8))
    options = {"max_new_tokens": 64, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(loaded.generate(ids, **options), model.generate(ids, **options))
    assert (tmp_path / "b" / "tokenizer.json").read_bytes() == (tmp_path / "a" / "tokenizer.json").read_bytes()


def test_learned_queries_are_not_taken_out_unless_that_is_allowed(tmp_path, capsys):
    saved(tmp_path / "b")
    message = refused(capsys, "unconvert", tmp_path / "b", tmp_path / "c")
    assert "b would change: logits differ by" in message
    assert "--allow-change" in message
    assert not (tmp_path / "c").exists()
    printed = run(capsys, "unconvert", tmp_path / "b", tmp_path / "c", "--allow-change")
    assert "CHANGED" in printed
    assert config_of(tmp_path / "c")["model_type"] == "llama"


def test_means_are_refused_with_the_part_that_notices(tmp_path, capsys):
    plain(tmp_path / "llama")
    plain(tmp_path / "olmo", "olmo2")
    mean = (*BLOCK, "--residual.read-scale", "mean")
    message = refused(capsys, "convert", tmp_path / "olmo", tmp_path / "b", *mean)
    assert "parts of this OLMo-2 model read without a norm" in message
    assert "layers.0.self_attn" in message
    message = refused(capsys, "convert", tmp_path / "llama", tmp_path / "b", *mean)
    assert "because reads are means and norms have an eps of 1e-06" in message
    assert not (tmp_path / "b").exists()
    printed = run(capsys, "convert", tmp_path / "olmo", tmp_path / "b", *mean, "--allow-change")
    assert "CHANGED" in printed
    assert "reads without a norm      layers.0.self_attn, layers.0.mlp" in printed


def test_strategies_that_are_other_functions_are_refused(tmp_path, capsys):
    plain(tmp_path / "a")
    assert "would change" in refused(capsys, "convert", tmp_path / "a", tmp_path / "b", "--residual", "postnorm")


def break_config(folder):
    (folder / "config.json").write_text("{")


def break_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def huge_header(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")


def change_config(**changes):
    def change(folder):
        config = {**config_of(folder), **changes}
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))

    return change


def change_weights(change):
    def apply(folder):
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return apply


def drop_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def only_pickles(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (break_config, "config.json is damaged: not JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors and no model.safetensors"),
        (only_pickles, "only pytorch_model.bin, which is not read because loading it can run code"),
        (break_weights, "model.safetensors is cut short"),
        (huge_header, "cut short or not a safetensors file: a header of 1099511627776 bytes"),
        (drop_tokenizer, "has no tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "the tokenizer in .* cannot be loaded"),
        (change_config(model_type="nonsense"), "cannot be used: .*nonsense"),
        (change_config(model_type=...), "cannot be used: "),
        (change_config(hidden_size=64), "do not fit its config: .*of another shape: .*embed_tokens"),
        (change_config(num_hidden_layers=4), r"missing: model\.layers\.3\."),
        (change_config(num_hidden_layers=2), r"not in this model: model\.layers\.2\."),
        (change_config(tie_word_embeddings=True), "tie_word_embeddings is true, but .* differ"),
        (change_weights(lambda tensors: tensors.pop("lm_head.weight")), "missing: lm_head.weight"),
        (change_config(model_type="mamba"), r"do not fit its config: missing: backbone\.embeddings\.weight"),
        (change_config(vocab_size="many"), "the config in .* cannot be used: "),
        (change_config(num_key_value_heads=0), "cannot be used|cannot be run|cannot be loaded"),
        (change_config(vocab_size=6_000_000), r"describes [\d,]+ parameters, but the files hold [\d,]+"),
        (change_config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000, but the files hold"),
        (change_config(max_position_embeddings=-3), "max_position_embeddings is -3; allowed: 1 or more"),
        (change_config(pad_token_id=500), "cannot be "),
        (change_config(attn_implementation="flash_attention_2"), "cannot be "),
        (change_config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}), "cannot be "),
        (change_config(note="\ud800"), "config.json is damaged"),
        (change_weights(lambda tensors: tensors["lm_head.weight"].fill_(float("nan"))), "would change|not finite"),
    ],
)
def test_bad_sources_get_one_line_and_leave_nothing(break_it, message, tmp_path, capsys):
    plain(tmp_path / "a")
    break_it(tmp_path / "a")
    assert re.search(message, refused(capsys, "convert", tmp_path / "a", tmp_path / "b", *BLOCK))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_other_bad_input_gets_one_line_and_leaves_nothing(tmp_path, capsys):
    plain(tmp_path / "a")
    saved(tmp_path / "converted", learned())
    (tmp_path / "there").mkdir()
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    names = sorted(path.name for path in tmp_path.iterdir())
    to = tmp_path / "b"
    for arguments, message in (
        (("convert", tmp_path / "none", to), "none is not a folder"),
        (("convert", tmp_path / "converted", to), "has a residual strategy already"),
        (("convert", tmp_path / "a", tmp_path / "there"), "there exists already; allowed is a new folder"),
        (("convert", tmp_path / "a", to, "--residual", "sideways"), "residual is 'sideways'; allowed"),
        (("convert", tmp_path / "a", to, "--residual.sublayers-per-block", "0"), "sublayers_per_block is 0"),
        (("convert", tmp_path / "a", to, "--residual.num-blocks", "9"), "num_blocks is 9; allowed is 1 to 6"),
        (("convert", tmp_path / "a", to, "--tokens", "1"), "tokens is 1; allowed: 2 or more"),
        (("convert", tmp_path / "a", to, "--text-file", tmp_path / "empty.txt"), "empty.txt is empty"),
        (("convert", tmp_path / "a", to, "--text-file", tmp_path / "latin.txt"), "latin.txt is not text in UTF-8"),
        (("convert", tmp_path / "a", to, "--text-file", tmp_path / "no.txt"), "no.txt: No such file"),
        (("unconvert", tmp_path / "a", to), "allowed is a folder that attnres wrote"),
    ):
        assert message in refused(capsys, *arguments)
        assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_disk_that_is_full_is_one_line(tmp_path, capsys, monkeypatch):
    plain(tmp_path / "a")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("attnres.interop.folder.write_file", full)
    assert "No space left on device" in refused(capsys, "convert", tmp_path / "a", tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_all_that_a_tokenizer_has_goes_along(tmp_path, capsys):
    plain(tmp_path / "a")
    (tmp_path / "a" / "additional_chat_templates").mkdir()
    for name in ("additional_chat_templates/tool_use.jinja", "chat_template.jinja", "spiece.model", "tekken.json"):
        (tmp_path / "a" / name).write_text(f"{{# {name} #}}")
    run(capsys, "convert", tmp_path / "a", tmp_path / "b", *BLOCK)
    for name in ("additional_chat_templates/tool_use.jinja", "chat_template.jinja", "spiece.model", "tekken.json"):
        assert (tmp_path / "b" / name).read_text() == f"{{# {name} #}}"


def test_numbers_that_json_has_not_are_null(tmp_path, capsys):
    plain(tmp_path / "a")
    change_weights(lambda tensors: tensors["lm_head.weight"].fill_(float("nan")))(tmp_path / "a")
    printed = run(capsys, "convert", tmp_path / "a", tmp_path / "b", *BLOCK, "--json", "--allow-change")
    assert json.loads(printed, parse_constant=pytest.fail)["perplexity_after"] is None


def test_nothing_in_a_folder_is_run(tmp_path, capsys):
    plain(tmp_path / "a")
    ran = tmp_path / "ran"
    (tmp_path / "a" / "modeling_evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    auto_map = {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    change_config(auto_map=auto_map)(tmp_path / "a")
    run(capsys, "convert", tmp_path / "a", tmp_path / "b", *BLOCK)
    assert not ran.exists()
    assert "auto_map" not in config_of(tmp_path / "b")
    assert not (tmp_path / "b" / "modeling_evil.py").exists()
    change_config(model_type="evil")(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    refused(capsys, "convert", tmp_path / "a", tmp_path / "b", *BLOCK)
    assert not ran.exists()


def test_a_checkpoint_saved_without_its_head_prefix_converts(tmp_path, capsys):
    """As GPT-2's own checkpoint is: tensors are named as in the model without head."""
    model = plain(tmp_path / "a", "gpt2")

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    change_weights(strip)(tmp_path / "a")
    assert "the same to rounding" in run(capsys, "convert", tmp_path / "a", tmp_path / "b", *BLOCK)
    ids = torch.randint(3, 96, (1, 6))
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "b")(ids).logits, model(ids).logits)


def test_a_base_family_that_is_no_attention_and_mlp_is_refused_by_name(tmp_path, capsys):
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "pad_token_id": 0}
    config = RecurrentGemmaConfig(num_attention_heads=4, lru_width=32, **shape)
    RecurrentGemmaForCausalLM(config).save_pretrained(tmp_path / "a")
    tokenizer().save_pretrained(tmp_path / "a")
    message = refused(capsys, "convert", tmp_path / "a", tmp_path / "b", *BLOCK)
    assert "RecurrentGemmaModel is no known family, and its layers (RecurrentGemmaDecoderLayer) do not look" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_kill_in_the_middle_of_writing_leaves_no_destination_and_the_next_try_works(tmp_path, capsys):
    plain(tmp_path / "a")
    code = (
        "import os, signal\n"
        "import attnres.interop.folder as folder\n"
        "from attnres.cli import main\n"
        "write = folder.write_file\n"
        "def killed(path, tensors, metadata):\n"
        "    write(path, list(tensors)[:3], metadata)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "folder.write_file = killed\n"
        f"main(['convert', {str(tmp_path / 'a')!r}, {str(tmp_path / 'b')!r}])\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "b").exists()
    run(capsys, "convert", tmp_path / "a", tmp_path / "b", *BLOCK)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "b").model.residual.strategy.sublayers_per_block == 3
