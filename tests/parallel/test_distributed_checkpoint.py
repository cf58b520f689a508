"""Checkpoints of several ranks: no pickle, verified, readable by anybody, and whole or absent."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from attnres.errors import CheckpointError
from attnres.parallel.checkpoint import StoredTensors
from attnres.train import Checkpoints, find_checkpoint, load_weights, read_checkpoint, verify_checkpoint
from parallel.processes import RankError
from parallel.work_checkpoint import TENSORS, fit_and_die, load_shards, save_shards
from parallel.work_train import fit_several, model_of

FSDP = {"data": 2, "sharding": "fsdp"}


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def saved(processes: Any, tmp_path: Path) -> Path:
    processes.run(4, save_shards, str(tmp_path / "checkpoints"))
    (path,) = Checkpoints(tmp_path / "checkpoints").paths()
    return path


def test_every_rank_writes_a_safetensors_file_of_its_own_and_nothing_else(saved: Path) -> None:
    names = files(saved)
    assert {name.rpartition(".")[2] for name in names} == {"safetensors", "json"}
    assert sum(name.startswith("model/shard-") for name in names) == 4
    manifest = json.loads((saved / "manifest.json").read_text())
    assert manifest["format"] == 2
    assert set(manifest["files"]) == set(names) - {"manifest.json"}


def test_one_process_reads_what_four_wrote(saved: Path) -> None:
    read = read_checkpoint(saved)
    assert read.step == 3
    for found, prefix in ((read.model, ""), (read.optimizer, "/exp_avg")):
        assert {name.removesuffix(prefix) for name in found} == set(TENSORS)
        assert all(torch.equal(found[name + prefix], tensor) for name, tensor in TENSORS.items())


def test_pytorch_reads_it_as_well(saved: Path) -> None:
    metadata = HuggingFaceStorageReader(str(saved / "model")).read_metadata()
    sizes = {name: tuple(found.size) for name, found in metadata.state_dict_metadata.items()}  # pyright: ignore[reportAttributeAccessIssue]
    assert sizes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_ranks_reads_its_own_shards(processes: Any, saved: Path, size: int) -> None:
    assert processes.run(size, load_shards, str(saved)) == [[]] * size


def test_ranks_read_a_file_of_one_process(processes: Any, tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(
        model=TENSORS, optimizer={f"{name}/exp_avg": tensor for name, tensor in TENSORS.items()}, state={"step": 3}
    )
    assert processes.run(2, load_shards, str(tmp_path / "step-00000003")) == [[], []]


@pytest.mark.parametrize("damage", ["flipped", "missing", "elsewhere"])
def test_damage_of_any_file_is_found(saved: Path, damage: str) -> None:
    name = next(name for name in files(saved) if name.startswith("optimizer/"))
    if damage == "flipped":
        content = bytearray((saved / name).read_bytes())
        content[-1] ^= 1
        (saved / name).write_bytes(content)
    elif damage == "missing":
        (saved / name).unlink()
    else:
        manifest = json.loads((saved / "manifest.json").read_text())
        manifest["files"]["../../other.safetensors"] = manifest["files"].pop(name)
        (saved / "manifest.json").write_text(json.dumps(manifest))
        name = "other.safetensors"
    with pytest.raises(CheckpointError, match=rf"step-00000003 is damaged: .*{name.rpartition('/')[2]}"):
        verify_checkpoint(saved)


def test_a_file_that_the_manifest_does_not_list_is_not_read(saved: Path) -> None:
    save_file({"b": torch.zeros(5), "intruder": torch.zeros(1)}, saved / "model" / "shard-00009.safetensors")
    read = read_checkpoint(saved)
    assert "intruder" not in read.model
    assert torch.equal(read.model["b"], TENSORS["b"])


def test_a_piece_that_is_missing_is_an_error_and_no_guess(saved: Path) -> None:
    stored = StoredTensors(sorted((saved / "model").iterdir())[1:])
    with pytest.raises(CheckpointError, match=r"the files hold .* of the .* numbers"):
        dict(stored)


def test_a_write_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(processes: Any, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        processes.run(2, save_shards, str(tmp_path / "checkpoints"), 1)
    assert set(caught.value.errors) == {0, 1}
    assert all("CheckpointError" in text and "no room" in text for text in caught.value.errors.values())
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_rank_killed_inside_a_save_leaves_the_last_good_checkpoint(processes: Any, tmp_path: Path) -> None:
    """SIGKILL of a rank while the second checkpoint is written; the run then goes on from the first."""
    folder = tmp_path / "run"
    with pytest.raises(RankError) as caught:
        processes.run(2, fit_and_die, str(folder), FSDP)
    assert caught.value.errors[1] == "the process ended"
    assert 0 in caught.value.errors
    checkpoints = Checkpoints(folder / "checkpoints")
    assert [path.name for path in checkpoints.paths()] == ["step-00000002"]
    assert read_checkpoint(checkpoints.paths()[0]).step == 2
    processes.run(2, fit_several, [(str(folder), FSDP, {"resume": True})])
    processes.run(2, fit_several, [(str(tmp_path / "whole"), FSDP, {})])
    ours, theirs = (read_checkpoint(find_checkpoint(run)).model for run in (folder, tmp_path / "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not list(folder.rglob("*.partial"))


def test_weights_of_a_mesh_run_load_into_a_plain_model(processes: Any, tmp_path: Path) -> None:
    mesh = {"pipeline": 2, "data": 2, "sharding": "fsdp"}
    processes.run(4, fit_several, [(str(tmp_path / "run"), mesh, {"steps": 1})])
    model = model_of("block", seed=5)
    path = load_weights(model, tmp_path / "run")
    saved = read_checkpoint(path).model
    assert all(torch.equal(parameter, saved[name]) for name, parameter in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert oct(os.stat(path / "state.json").st_mode & 0o777) == "0o644"
