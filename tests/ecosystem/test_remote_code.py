"""A converted folder with code of its own, where attnres is not installed."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from attnres.cli import main
from attnres.models import convert
from attnres.models.remote import CODE_FILE
from attnres.residual import BlockAttnRes, DepthSite
from ecosystem.checkpoints import tokenizer
from models.small import ALL_CONFIGS, make

BLOCKED = """
import sys

class NoAttnres:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "attnres":
            raise ImportError("attnres is not here")

sys.meta_path.insert(0, NoAttnres())
"""
LOAD = """
import torch
from transformers import AutoModelForCausalLM

results = {{}}
for name, folder in {folders!r}.items():
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    ids = torch.load({ids!r})
    mask = torch.ones_like(ids)
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
        text = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    model(ids, labels=ids).loss.backward()
    grad = model.base_model.residual.sites[2].pseudo_query.grad
    results[name] = [out.logits, text, list(out.hidden_states), type(model).__name__, grad]
torch.save(results, {out!r})
"""
FORMS = {
    "full": ("--residual", "full"),
    "count": ("--residual", "block", "--residual.num-blocks", "2"),
    "balanced": ("--residual", "block", "--residual.sublayers-per-block", "5", "--residual.remainder", "balanced"),
    "mean": ("--residual.sublayers-per-block", "9", "--residual.read-scale", "mean", "--allow-change"),
}
BY_FAMILY = {family: ("--residual.sublayers-per-block", "3") for family in ALL_CONFIGS if family != "kimi_linear"}
"""Kimi Linear takes other kernels in a process of its own, where fla-core is installed, and these need a GPU."""


def folder_of(tmp_path, family, *options):
    torch.manual_seed(0)
    make(family).save_pretrained(tmp_path / "plain")
    tokenizer().save_pretrained(tmp_path / "plain")
    main(["convert", str(tmp_path / "plain"), str(tmp_path / "converted"), "--remote-code", *options])
    path = tmp_path / "converted" / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if "pseudo_query" in name or "key_weight" in name:
            tensors[name] = tensors[name] + 0.5 * torch.randn_like(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})
    return tmp_path / "converted"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Folders by name, the ids they are asked about, and what a process without attnres says."""
    root = tmp_path_factory.mktemp("remote")
    folders = {}
    for name, options in {**BY_FAMILY, **FORMS}.items():
        (root / name).mkdir()
        folders[name] = str(folder_of(root / name, name if name in BY_FAMILY else "llama", *options))
    ids = torch.randint(3, 96, (2, 7))
    torch.save(ids, root / "ids.pt")
    code = BLOCKED + LOAD.format(folders=folders, ids=str(root / "ids.pt"), out=str(root / "out.pt"))
    environment = {"HF_HOME": str(root / "home"), "PATH": "/usr/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return folders, ids, torch.load(root / "out.pt")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BY_FAMILY, *FORMS])
def test_another_process_without_attnres_computes_the_same(name, elsewhere):
    folders, ids, results = elsewhere
    ours = AutoModelForCausalLM.from_pretrained(folders[name]).eval()
    logits, text, hidden, class_name, grad = results[name]
    with torch.no_grad():
        outputs = ours(ids, output_hidden_states=True)
    assert class_name == type(ours).__name__
    torch.testing.assert_close(logits, outputs.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hidden, list(outputs.hidden_states), rtol=1e-4, atol=1e-4)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(text, ours.generate(ids, **options))
    ours(ids, labels=ids).loss.backward()
    torch.testing.assert_close(grad, ours.base_model.residual.sites[2].pseudo_query.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_saving_such_a_model_again_saves_the_code_too(elsewhere, tmp_path):
    folders, *_ = elsewhere
    AutoModelForCausalLM.from_pretrained(folders["llama"]).save_pretrained(tmp_path / "by-attnres")
    code = BLOCKED + (
        "from transformers import AutoModelForCausalLM as Auto\n"
        f"model = Auto.from_pretrained({str(tmp_path / 'by-attnres')!r}, trust_remote_code=True)\n"
        f"model.save_pretrained({str(tmp_path / 'by-code')!r})\n"
        f"Auto.from_pretrained({str(tmp_path / 'by-code')!r}, trust_remote_code=True)\n"
    )
    environment = {"HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "by-code" / CODE_FILE).is_file()


def test_with_attnres_the_code_in_the_folder_is_not_used(tmp_path):
    folder = folder_of(tmp_path, "llama")
    (folder / CODE_FILE).write_text("raise RuntimeError('ran')")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert isinstance(model.model.residual.sites[0], DepthSite)


def test_other_strategies_are_refused_and_nothing_is_written(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        folder_of(tmp_path, "llama", "--residual", "top-k")
    assert stop.value.code == 2
    assert "has Full and Block AttnRes; the strategy is" in capsys.readouterr().err
    assert not (tmp_path / "converted").exists()


def test_without_the_flag_there_is_no_code(tmp_path):
    torch.manual_seed(0)
    make("llama").save_pretrained(tmp_path / "plain")
    tokenizer().save_pretrained(tmp_path / "plain")
    main(["convert", str(tmp_path / "plain"), str(tmp_path / "converted")])
    assert not (tmp_path / "converted" / CODE_FILE).exists()
    assert "auto_map" not in json.loads((tmp_path / "converted" / "config.json").read_text())
    assert convert(make("llama"), BlockAttnRes(num_blocks=2)).config.to_dict().get("auto_map") is None
