"""Bad input of every kind is one line, and nothing is written; nothing in a folder runs; memory stays small."""

import json
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from attnres.errors import CheckpointError
from attnres.interop import export_checkpoint, import_checkpoint
from attnres.interop.stored import CHUNK, read_header
from interop.folders import assert_same, files, read_tensors, write

DIM = 8


def tensors(layers=2):
    stems = [f"model.layers.{i}.{half}_res" for i in range(layers) for half in ("self_attention", "mlp")]
    depth = {}
    for stem in [*stems, "model.output_attn_res"]:
        depth |= {f"{stem}_proj.weight": torch.randn(1, DIM), f"{stem}_norm.weight": torch.randn(DIM)}
    ends = {"model.embed_tokens.weight": (20, DIM), "model.norm.weight": (DIM,), "lm_head.weight": (20, DIM)}
    parts = {"input_layernorm.weight": (DIM,), "self_attn.q_proj.weight": (4, DIM), "mlp.up_proj.weight": (4, DIM)}
    parts |= {"post_attention_layernorm.weight": (DIM,)}
    base = ends | {f"model.layers.{i}.{part}": shape for i in range(layers) for part, shape in parts.items()}
    return depth | {name: torch.randn(shape) for name, shape in base.items()}


CONFIG = {"model_type": "kimi_linear", "hidden_size": DIM, "num_hidden_layers": 2, "attn_res_block_size": 1}


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "source", CONFIG, tensors())


@pytest.fixture
def sharded(tmp_path):
    return write(tmp_path / "sharded", CONFIG, tensors(), shards=3)


def refuse(source, message):
    """The import fails with one line that says what, and leaves nothing behind."""
    before = sorted(path.name for path in source.parent.iterdir())
    with pytest.raises(CheckpointError, match=message) as caught:
        import_checkpoint(source, source.parent / "ours")
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in source.parent.iterdir()) == before


def test_a_folder_that_is_not_there(tmp_path):
    refuse(tmp_path / "nowhere", "nowhere is not a folder")


def test_a_folder_without_a_config(source):
    (source / "config.json").unlink()
    refuse(source, "has no config.json")


@pytest.mark.parametrize("text", ["{", "", "[]", "\x00"], ids=["cut", "empty", "list", "zero"])
def test_a_config_that_is_no_table(source, text):
    (source / "config.json").write_text(text, encoding="utf-8")
    refuse(source, r"config\.json is damaged")


def test_a_config_of_nothing_that_is_known(source):
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    refuse(source, r"model_type 'llama'\) is none of kimi-k3, fla, inkling2")


def test_a_folder_without_weights(source):
    (source / "model.safetensors").unlink()
    refuse(source, r"has no model\.safetensors and no model\.safetensors\.index\.json")


def test_a_pickle_is_not_opened(source):
    """A file that would run code when it is unpickled, in place of the weights."""
    (source / "model.safetensors").unlink()

    class Trap:
        def __reduce__(self):
            return (Path.touch, (source / "sprung",))

    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    refuse(source, r"only pytorch_model\.bin, which is not read because loading it can run code")
    assert not (source / "sprung").exists()


def test_code_in_a_folder_is_neither_run_nor_copied(source, tmp_path):
    trap = f"open({str(tmp_path / 'sprung')!r}, 'w')"
    for name in ("modeling_kimi.py", "configuration_kimi.py", "tokenization_kimi.py"):
        (source / name).write_text(trap, encoding="utf-8")
    config = {**CONFIG, "auto_map": {"AutoConfig": "configuration_kimi.Config", "AutoModel": "modeling_kimi.Model"}}
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    import_checkpoint(source, tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    assert not (tmp_path / "sprung").exists()
    assert not list((tmp_path / "ours").glob("*.py"))
    assert "auto_map" not in (tmp_path / "ours" / "config.json").read_text()
    assert "auto_map" not in (tmp_path / "back" / "config.json").read_text()


def test_what_tokenizers_and_generation_need_is_copied(source, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "LICENSE"):
        (source / name).write_text(f"{{}} {name}", encoding="utf-8")
    (source / "README.md").write_text("no", encoding="utf-8")
    import_checkpoint(source, tmp_path / "ours")
    copied = {path.name for path in (tmp_path / "ours").iterdir()} - {"config.json", "model.safetensors"}
    assert copied == {
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "LICENSE",
    }
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == "{} tokenizer.json"


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1], ids=["empty", "in-length", "length", "in-header", "last-byte"])
def test_a_file_that_is_cut_short(source, keep):
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refuse(source, r"model\.safetensors is cut short")


def test_a_shard_that_is_cut_short(sharded):
    file = sharded / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    refuse(sharded, r"model-00002-of-00003\.safetensors is cut short")


def test_a_file_that_is_too_long(source):
    with (source / "model.safetensors").open("ab") as file:
        file.write(b"more")
    refuse(source, r"model\.safetensors is damaged: its header describes")


def test_a_header_that_asks_for_more_than_there_is_is_not_allocated(source):
    """A length of 2**62 bytes in a file of a hundred."""
    (source / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}" * 50)
    refuse(source, "a header of 4611686018427387904 bytes in a file of 108")


HEADERS = {
    "not-json": b"{nonsense}",
    "list": b"[1, 2]",
    "twice": b'{"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, "a": 1}',
    "size": b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
    "huge": b'{"a": {"dtype": "F32", "shape": [9999999999999], "data_offsets": [0, 39999999999996]}}',
    "negative": b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
    "dtype": b'{"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}',
    "fields": b'{"a": {"dtype": "F32"}}',
    "gap": b'{"a": {"dtype": "F32", "shape": [], "data_offsets": [4, 8]}}',
    "overlap": b'{"a": {"dtype": "I16", "shape": [2], "data_offsets": [0, 4]},'
    b'"b": {"dtype": "I16", "shape": [], "data_offsets": [2, 4]}}',
    "metadata": b'{"__metadata__": {"a": 1}}',
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_contradicts_itself(source, header):
    (source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    refuse(source, r"model\.safetensors")


def rewrite_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


SHARD = "model-00001-of-00003.safetensors"
INDEXES = {
    "no-map": (lambda index: index.pop("weight_map"), "is damaged"),
    "empty": (lambda index: index.update(weight_map={}), "names no tensor"),
    "elsewhere": (lambda index: index["weight_map"].update({"a": "../other.safetensors"}), "names the file '../other"),
    "absolute": (lambda index: index["weight_map"].update({"a": "/etc/passwd"}), "names the file '/etc/passwd'"),
    "number": (lambda index: index["weight_map"].update({"a": 3}), "names the file 3"),
    "absent": (lambda index: index["weight_map"].update({"a": SHARD}), "named but absent: a"),
    "unnamed": (lambda index: index["weight_map"].pop("lm_head.weight"), r"not named: lm_head\.weight"),
    "another": (
        lambda index: index["weight_map"].update({"lm_head.weight": SHARD.replace("1", "2", 1)}),
        r"in another file: lm_head\.weight",
    ),
    "no-file": (lambda index: index["weight_map"].update({"a": "x.safetensors"}), r"has no x\.safetensors, which"),
}


@pytest.mark.parametrize(("change", "message"), INDEXES.values(), ids=INDEXES)
def test_an_index_that_contradicts_the_files(sharded, change, message):
    rewrite_index(sharded, change)
    refuse(sharded, message)


def test_a_tensor_in_two_shards(sharded):
    again = {"lm_head.weight": torch.ones(1), "only.here": torch.ones(1)}
    save_file(again, sharded / "more.safetensors")
    rewrite_index(sharded, lambda index: index["weight_map"].update({"only.here": "more.safetensors"}))
    refuse(sharded, r"lm_head\.weight is in model-\d+-of-00003\.safetensors and in more\.safetensors")


def test_one_file_and_an_index(sharded):
    save_file({"a": torch.ones(1)}, sharded / "model.safetensors")
    refuse(sharded, "allowed is one of the two")


@pytest.mark.parametrize("direction", ["import", "export"])
@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_a_destination_that_is_there_stays_as_it_is(source, tmp_path, direction, what):
    import_checkpoint(source, tmp_path / "ours")
    target = tmp_path / "target"
    if what == "file":
        target.write_text("mine", encoding="utf-8")
    elif what == "folder":
        target.mkdir()
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="target exists already"):
        import_checkpoint(source, target) if direction == "import" else export_checkpoint(tmp_path / "ours", target)
    assert target.is_symlink() or target.is_dir() or target.read_text() == "mine"
    assert not target.is_dir() or not list(target.iterdir())


def test_a_write_that_fails_leaves_nothing(source, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device", str(arguments[0]))

    monkeypatch.setattr("attnres.interop.folder.write_file", fail)
    before = files(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        import_checkpoint(source, tmp_path / "ours")
    assert files(tmp_path) == before


def test_a_source_that_changes_while_it_is_copied_is_noticed(source, tmp_path, monkeypatch):
    """The header is read; then somebody cuts the file."""
    from attnres.interop import checkpoints

    written = checkpoints.write_folder

    def cut(*arguments, **keywords):
        file = source / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
        written(*arguments, **keywords)

    monkeypatch.setattr(checkpoints, "write_folder", cut)
    with pytest.raises(CheckpointError, match="it has been changed"):
        import_checkpoint(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    assert not list(tmp_path.glob(".*partial"))


def test_a_folder_of_links_is_read(source, tmp_path):
    """As the download cache of the Hugging Face hub is."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in source.iterdir():
        (linked / path.name).symlink_to(path)
    import_checkpoint(linked, tmp_path / "ours")
    assert not (tmp_path / "ours" / "model.safetensors").is_symlink()


def test_metadata_of_files_and_index_stays(sharded, tmp_path):
    rewrite_index(sharded, lambda index: index["metadata"].update({"note": "kept"}))
    import_checkpoint(sharded, tmp_path / "ours")
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["note"] == "kept"
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in read_tensors(sharded).values())
    assert read_header(tmp_path / "ours" / SHARD)[1] == {"format": "pt"}


def test_every_dtype_of_the_format_is_copied_as_it_is(source, tmp_path):
    odd = {
        "i64": torch.randint(-5, 5, (3,)),
        "u8": torch.randint(0, 255, (5,), dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "f16": torch.randn(3).half(),
        "f64": torch.randn(2, 2).double(),
        "f8": torch.randn(7).to(torch.float8_e5m2),
        "c64": torch.randn(2, dtype=torch.complex64),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
    }
    everything = write(tmp_path / "odd", CONFIG, {**tensors(), **odd})
    import_checkpoint(everything, tmp_path / "ours")
    assert_same({name: t for name, t in read_tensors(tmp_path / "ours").items() if name in odd}, odd)


def test_memory_does_not_grow_with_the_weights(tmp_path):
    big = {**tensors(), "model.embed_tokens.weight": torch.zeros(16 * CHUNK // 4 // DIM, DIM)}
    source = write(tmp_path / "big", CONFIG, big)
    del big
    import_checkpoint(source, tmp_path / "warm")
    tracemalloc.start()
    import_checkpoint(source, tmp_path / "ours")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * CHUNK
    assert (tmp_path / "ours" / "model.safetensors").stat().st_size > 16 * CHUNK


def test_an_export_of_a_folder_that_is_not_ours(source, tmp_path):
    with pytest.raises(CheckpointError, match="model_type is 'kimi_linear'; allowed is a folder that attnres wrote"):
        export_checkpoint(source, tmp_path / "back")


def test_a_kind_that_does_not_exist(source, tmp_path):
    with pytest.raises(CheckpointError, match="kind is 'gguf'; allowed: auto, kimi-k3, fla, inkling2"):
        import_checkpoint(source, tmp_path / "ours", kind="gguf")


def test_importing_the_package_is_light():
    code = "import attnres.interop, sys; print('fla' in sys.modules, 'datasets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
