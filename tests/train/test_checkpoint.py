import json
from pathlib import Path

import pytest
import torch

from attnres.errors import CheckpointError
from attnres.train import Checkpoints, find_checkpoint, read_checkpoint, verify_checkpoint

MODEL = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, 3).t()}
OPTIMIZER = {"a/exp_avg": torch.zeros(2, 3), "a/step": torch.tensor(3.0)}


def save(root: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(root)
    for step in steps:
        checkpoints.save(model=MODEL, optimizer=OPTIMIZER, state={"step": step, "note": "x"})
    return checkpoints


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    (path,) = save(tmp_path / "checkpoints", 5).paths()
    read = read_checkpoint(path)
    assert read.step == 5
    assert read.state == {"step": 5, "note": "x"}
    assert all(torch.equal(read.model[name], MODEL[name]) for name in MODEL)
    assert all(torch.equal(read.optimizer[name], OPTIMIZER[name]) for name in OPTIMIZER)


def test_a_checkpoint_is_safetensors_and_json_only(tmp_path: Path) -> None:
    (path,) = save(tmp_path / "checkpoints", 5).paths()
    assert names(path) == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 5
    assert set(manifest["files"]) == {"model.safetensors", "optimizer.safetensors", "state.json"}
    assert all(entry["bytes"] == (path / name).stat().st_size for name, entry in manifest["files"].items())


def test_an_error_while_saving_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = save(tmp_path / "checkpoints", 5)
    with pytest.raises(ValueError, match="JSON compliant"):
        checkpoints.save(model=MODEL, optimizer=OPTIMIZER, state={"step": 6, "loss": float("nan")})
    assert names(tmp_path / "checkpoints") == ["step-00000005"]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 9, 10, 100)
    checkpoints.prune(2)
    assert names(tmp_path) == ["step-00000010", "step-00000100"]
    checkpoints.prune(5)
    assert len(checkpoints.paths()) == 2


def test_leftovers_are_no_checkpoints_and_are_cleaned(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1)
    (tmp_path / ".step-00000002.01234567.partial").mkdir()
    assert [path.name for path in checkpoints.paths()] == ["step-00000001"]
    checkpoints.clean()
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_every_kind_of_damage_is_found(tmp_path: Path, name: str, damage: str) -> None:
    (path,) = save(tmp_path, 5).paths()
    file = path / name
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[content.index(b"sha256") + 12 if name == "manifest.json" else len(content) // 2] ^= 1
    file.write_bytes(content[:-3] if damage == "cut" else content)
    if damage == "missing":
        file.unlink()
    with pytest.raises(CheckpointError, match="step-00000005"):
        verify_checkpoint(path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 5).paths()
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99; this version reads format 1"):
        verify_checkpoint(path)


def test_a_run_folder_means_its_newest_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 3, 7)
    assert find_checkpoint(tmp_path).name == "step-00000007"
    assert find_checkpoint(tmp_path / "checkpoints" / "step-00000003").name == "step-00000003"
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run folder"):
        find_checkpoint(tmp_path / "checkpoints")


def test_a_second_damaged_one_of_a_step_does_not_replace_the_first(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1, 2)
    for _ in range(2):
        (tmp_path / "step-00000002" / "model.safetensors").write_bytes(b"")
        checkpoint = checkpoints.newest(fallback=True)
        assert checkpoint is not None
        assert checkpoint.step == 1
        save(tmp_path, 2)
    assert names(tmp_path) == ["damaged-step-00000002", "damaged-step-00000002-1", "step-00000001", "step-00000002"]
