"""Checkpoint folders for tests: written and read with the safetensors library itself, not with what is tested."""

import json

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import attnres
from attnres.models.config import parse_strategy
from attnres.residual import DepthSite


def write(folder, config, tensors, *, shards=1):
    """A folder with the tensors dealt out to files in turn."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[index::shards]}
        weight_map |= dict.fromkeys(part, file)
        save_file(part, folder / file, metadata={"format": "pt"})
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def read_config(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def read_tensors(folder):
    """Every tensor of every file."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # not a dict
    return tensors


def assert_same(actual, expected):
    """The same names, dtypes, shapes and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        assert torch.equal(_bits(actual[name]), _bits(tensor)), name


def _bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def load(folder):
    """A folder of ours as a model: the base from its fields, converted, all weights loaded strictly."""
    config = read_config(folder)
    ours = ("model_type", "base_model_type", "attnres", "imported_from", "architectures")
    fields = {name: value for name, value in config.items() if name not in ours}
    base = AutoConfig.for_model(config["base_model_type"], **fields)
    model = attnres.convert(AutoModelForCausalLM.from_config(base), parse_strategy(config["attnres"]))
    missing, unexpected = model.load_state_dict(read_tensors(folder), strict=False)
    assert set(missing) <= ({"lm_head.weight"} if base.tie_word_embeddings else set())
    assert not unexpected
    model.tie_weights()
    return model.eval()


def randomise(model):
    """Pseudo-queries and key weights that matter."""
    for site in model.base_model.residual.sites:
        if isinstance(site, DepthSite):
            torch.nn.init.normal_(site.pseudo_query, std=0.5)
            torch.nn.init.normal_(site.key_weight, mean=1.0, std=0.3)
    return model


def files(folder):
    """Everything in a folder, with its bytes; None where there is nothing."""
    if not folder.exists():
        return None
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
