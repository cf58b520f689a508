import json
import sys
from pathlib import Path
from typing import Any

import pytest

from attnres.errors import BackendUnavailableError, DataError
from attnres.train import JsonlTracker, read_metrics
from attnres.train.folder import METRICS
from attnres.train.tracker import build_trackers
from train.tiny_run import tiny_config, tiny_trainer

ROWS = [{"kind": "train", "step": step, "loss": 1.0 / step} for step in range(1, 6)]


def write(folder: Path, rows: list[dict[str, Any]], *, step: int | None) -> None:
    tracker = JsonlTracker()
    tracker.start(folder, {}, step=step)
    for row in rows:
        tracker.log(row)
    tracker.flush()
    tracker.finish(None)


@pytest.mark.parametrize(("step", "kept"), [(None, 0), (0, 0), (3, 3), (5, 5)])
def test_resuming_drops_the_lines_after_the_checkpoint_and_keeps_the_others_byte_by_byte(
    tmp_path: Path, step: int | None, kept: int
) -> None:
    write(tmp_path, ROWS, step=None)
    before = (tmp_path / METRICS).read_text().splitlines()
    write(tmp_path, ROWS[kept:], step=step)
    assert (tmp_path / METRICS).read_text().splitlines() == before
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]


def test_a_line_is_readable_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    tracker = JsonlTracker()
    tracker.start(tmp_path, {}, step=None)
    tracker.log(ROWS[0])
    assert read_metrics(tmp_path) == ROWS[:1]
    tracker.finish(None)


def test_a_last_line_cut_short_is_left_out_and_one_in_the_middle_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, ROWS, step=None)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"kind": "tr')
    assert read_metrics(tmp_path) == ROWS
    with (tmp_path / METRICS).open("a") as file:
        file.write("\n" + json.dumps(ROWS[0]) + "\n")
    with pytest.raises(DataError, match="line 6 is no row of metrics"):
        read_metrics(tmp_path)


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tiny_trainer(tmp_path / "run", config=tiny_config(steps=3, trackers=("tensorboard",))).fit()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    losses = [event.value for event in events.Scalars("train/loss")]
    rows = [row for row in read_metrics(tmp_path / "run") if row["kind"] == "train"]
    assert losses == pytest.approx([row["loss"] for row in rows])
    assert "valid/bits_per_byte" in events.Tags()["scalars"]


@pytest.mark.parametrize(("name", "library"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_tracker_whose_library_is_missing_is_refused_with_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(BackendUnavailableError, match=rf"attnres\[{name}\]"):
        build_trackers([name])


class FakeWandb:
    """Stands in for the wandb module: remembers what it was given."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.rows: list[tuple[dict[str, Any], int]] = []
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None

    def init(self, **arguments: Any) -> "FakeWandb":
        self.inits.append(arguments)
        return self

    def log(self, numbers: dict[str, Any], *, step: int) -> None:
        self.rows.append((numbers, step))

    def finish(self, *, exit_code: int) -> None:
        self.exit_code = exit_code


def test_wandb_goes_on_under_the_same_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    result = tiny_trainer(tmp_path / "run", config=tiny_config(steps=3, trackers=("wandb",))).fit()
    assert fake.summary == result
    assert fake.exit_code == 0
    assert [step for _, step in fake.rows] == [0, 1, 2, 3, 3]
    tiny_trainer(tmp_path / "run", config=tiny_config(steps=3, trackers=("wandb",))).fit(resume=True)
    assert fake.inits[0]["id"] == fake.inits[1]["id"]
