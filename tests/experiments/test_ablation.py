"""The recipe of the paper's Table 4, and its committed result."""

import json

import pytest

from attnres.experiments.ablation import TABLE_4, comparison, main, table
from attnres.experiments.arms import parse_arm
from documents import ROOT

STUDY = ROOT / "results" / "ablation-1m"


def test_the_recipe_is_the_whole_table_with_paired_seeds():
    study = comparison()
    assert len(study.arms) == 12
    assert study.baseline == "prenorm"
    assert study.seeds == (0, 1, 2)
    assert study.base.model.num_hidden_layers == 16
    runs = list(study.runs())
    assert len(runs) == 36
    assert {run.train.seed for _, run in runs} == {0, 1, 2}


def test_the_arms_are_what_the_paper_names():
    labels = {row.name: parse_arm(row.arm).label for row in TABLE_4}
    assert labels["AttnRes Block (S=4)"] == "Block AttnRes (S=4)"
    assert labels["Full, window 1+8"] == "Full AttnRes, window 1+8"
    assert labels["Block, 16 heads"] == "Block (S=4) AttnRes, 16 heads"
    assert labels["Block, without RMSNorm"] == "Block (S=4) AttnRes, no key norm"


def test_the_paper_s_differences_are_its_losses():
    by_name = {row.name: row.loss for row in TABLE_4}
    assert min(by_name, key=by_name.__getitem__) == "Full, input-dependent query"
    assert by_name["Baseline (PreNorm)"] - by_name["AttnRes Full"] == pytest.approx(0.029)


def test_missing_data_is_one_line_and_nothing_is_left(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--out", str(tmp_path / "out"), "--data", str(tmp_path / "none")])
    assert stop.value.code == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_log_has_the_committed_table_beside_the_paper_s():
    rows = json.loads((STUDY / "table.json").read_text(encoding="utf-8"))
    assert [row["arm"] for row in rows] == [row.arm for row in TABLE_4]
    assert table(STUDY).strip() in (ROOT / "results" / "LOG.md").read_text(encoding="utf-8")
