"""The report: complete, self-contained, rebuilt to the byte."""

import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from analysis.synthetic import write_comparison, write_json, write_run
from attnres.analysis import load_comparison, write_report
from attnres.analysis.facts import caveats, depth_summary, flatten, settings
from attnres.analysis.table import comparison_table
from attnres.errors import CheckpointError, ConfigError

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Balance(html.parser.HTMLParser):
    """Checks that every element is closed, and collects ids and text."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


def parse(page):
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_comparison(tmp_path_factory.mktemp("runs") / "first", sublayers=12, sublayers_per_block=5, steps=100)


@pytest.fixture(scope="module")
def page(folder):
    return write_report(folder).read_text(encoding="utf-8")


def test_the_report_lies_in_its_folder_or_where_it_is_asked_for(folder, page, tmp_path):
    assert (folder / "report.html").read_text(encoding="utf-8") == page
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "there").mkdir()
    assert write_report(tmp_path, tmp_path / "there") == tmp_path / "there" / "report.html"
    assert write_report(tmp_path, tmp_path / "mine.html") == tmp_path / "mine.html"
    assert (tmp_path / "mine.html").read_bytes() == (tmp_path / "there" / "report.html").read_bytes()
    assert not (tmp_path / "report.html").exists()


def test_the_page_is_well_formed_and_its_ids_are_unique(page):
    ids = parse(page).ids
    assert len(ids) == len(set(ids))
    figures = re.findall(r"<svg .*?</svg>", page, flags=re.DOTALL)
    assert len(figures) == 2 + 3 + 3
    for svg in figures:
        ElementTree.fromstring(svg)


def test_the_page_needs_nothing_beside_it(page):
    assert "<script" not in page
    assert "@import" not in page
    links = re.findall(r'(?:href|src)="([^"]*)"|url\(([^)]*)\)', page)
    assert all((a or b).startswith(("#", "data:image/png;base64,")) for a, b in links)


def test_the_page_holds_every_arm_number_and_section(folder, page):
    text = re.sub(r"\s+", " ", " ".join(parse(page).text))
    for row in comparison_table(load_comparison(folder)):
        assert row.label in text
        assert f"{row.valid_loss:.4f}" in text
        assert f"{row.matched_loss:.4f}" in text
    for heading in (
        "Loss during training",
        "Loss against time",
        "Output magnitude",
        "Gradient magnitude",
        "Input magnitude",
    ):
        assert heading in text
    for fact in (
        "3f1c2ab9d04e",
        "2.13.0",
        "AMD EPYC 9B14",
        "residual.sublayers_per_block",
        "4,300,000 parameters",
        "819,200",
    ):
        assert fact in text
    for words in (
        "a block closes after sublayer 5 and 10",
        "1 is what a plain residual sum does",
        "nats per token",
        "Caveats",
    ):
        assert words in text
    assert "2026-11-29T10:10:00+00:00 to 2026-11-29T10:12:00+00:00" in text


def test_the_report_is_rebuilt_to_the_byte_anywhere_in_any_process(folder, page, tmp_path):
    shutil.copytree(folder, tmp_path / "first")
    script = "import sys; from attnres.analysis import write_report; write_report(sys.argv[1])"
    environment = os.environ | {"PYTHONHASHSEED": "77", "TZ": "Asia/Tokyo", "MPLBACKEND": "svg"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "first")], check=True, env=environment)
    assert (tmp_path / "first" / "report.html").read_text(encoding="utf-8") == page


def test_a_report_that_cannot_be_made_leaves_the_old_one_and_nothing_aside(tmp_path, monkeypatch):
    copy = write_run(tmp_path / "first", sublayers=2, steps=50)
    (copy / "report.html").write_text("old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match=r"report\.html: the report cannot be written \(No space left on device\)"):
        write_report(copy)
    assert (copy / "report.html").read_text() == "old"
    assert not [path for path in copy.iterdir() if path.suffix == ".tmp"]


def test_wrong_folders_are_refused(tmp_path):
    folder = write_run(tmp_path / "run", sublayers=2, steps=50, stop_at=2)
    with pytest.raises(CheckpointError, match="no such run folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="there is no folder"):
        write_report(folder, tmp_path / "not" / "there.html")


def test_unfinished_unmeasured_and_absent_runs_are_said_so(tmp_path):
    folder = write_comparison(
        tmp_path / "c",
        seeds=(0, 1),
        sublayers=4,
        steps=50,
        unfinished=("full-seed0", "full-seed1"),
        without_depth=("prenorm-seed0", "prenorm-seed1"),
        absent=("block-seed1",),
    )
    text = re.sub(r"\s+", " ", " ".join(parse(write_report(folder).read_text(encoding="utf-8")).text))
    assert "full-seed0: unfinished at step 20" in text
    assert "block-seed1: not started (no such folder)" in text
    assert "Full AttnRes (unfinished)" in text
    assert "Not measured (no depth.json): PreNorm, Full AttnRes." in text
    assert "train.seed" not in text.split("Settings that all arms share")[0]


@pytest.mark.parametrize("stop_at", [None, 20, 1], ids=["finished", "unfinished", "just begun"])
def test_a_lone_run_gets_a_report(tmp_path, stop_at):
    folder = write_run(tmp_path / "mine", sublayers=4, steps=50, stop_at=stop_at)
    text = " ".join(parse(write_report(folder).read_text(encoding="utf-8")).text)
    assert "BlockAttnRes" in text
    assert "baseline" not in text
    assert ("finished" if stop_at is None else "unfinished at step") in text
    assert ("Depth weights" in text) == (stop_at is None)


def test_a_run_with_only_a_config_gets_a_report(tmp_path):
    write_json(tmp_path / "config.json", {"residual": {"type": "PreNorm"}})
    page = write_report(tmp_path).read_text(encoding="utf-8")
    parse(page)
    assert "unfinished at step 0" in page
    assert "no run has an environment.json" in page


def test_names_are_escaped(tmp_path):
    folder = write_comparison(tmp_path / "a<b>&c", arms=("prenorm", "full"), seeds=(0,), sublayers=2, steps=50)
    content = json.loads((folder / "compare.json").read_text())
    write_json(folder / "compare.json", content | {"labels": {"full": "<script>alert(1)</script>"}})
    page = write_report(folder).read_text(encoding="utf-8")
    parse(page)
    assert "<script" not in page
    assert "a&lt;b&gt;&amp;c" in page


def test_findings_say_when_no_difference_is_shown(tmp_path):
    folder = write_comparison(tmp_path / "c", arms=("prenorm", "full"), seeds=(0, 1), sublayers=2, steps=50)
    for seed, loss in ((0, 2.0), (1, 5.0)):
        path = folder / f"full-seed{seed}" / "result.json"
        write_json(path, json.loads(path.read_text()) | {"valid_loss": loss})
    assert "it includes zero, so no difference is shown" in write_report(folder).read_text(encoding="utf-8")


def test_settings_are_told_apart_by_whether_the_arms_differ(folder):
    found = {setting.key: setting for setting in settings(load_comparison(folder))}
    assert found["residual.type"].values == ("PreNorm", "BlockAttnRes", "FullAttnRes")
    assert found["residual.sublayers_per_block"].values == ("not set", "5", "not set")
    assert not found["residual.type"].shared
    assert found["train.seed"].values == ("0, 1, 2",) * 3
    assert found["train.seed"].shared
    assert flatten({"a": {"b": 0.004, "c": {}}, "d": None, "e": [1, 2]}) == {
        "a.b": "0.004",
        "a.c": "{}",
        "d": "null",
        "e": "[1, 2]",
    }


def test_caveats_name_what_limits_the_comparison(tmp_path):
    folder = write_comparison(tmp_path / "c", arms=("prenorm", "full"), seeds=(0,), sublayers=2, steps=50)
    plain = " ".join(found(folder))
    assert "One seed" in plain
    assert "wall-clock" in plain
    assert "environment" not in plain
    run = folder / "full-seed0"
    environment = json.loads((run / "environment.json").read_text()) | {"threads": 8, "dirty": True}
    write_json(run / "environment.json", environment)
    write_json(run / "result.json", json.loads((run / "result.json").read_text()) | {"tokens": 7})
    text = " ".join(found(folder))
    assert "these differ: dirty, threads" in text
    assert "uncommitted changes" in text
    assert "different numbers of tokens" in text


def found(folder):
    comparison = load_comparison(folder)
    return caveats(comparison, comparison_table(comparison))


def test_the_depth_summary_of_a_residual_sum_is_even(folder):
    prenorm, *_ = load_comparison(folder).arms
    summary = depth_summary(prenorm)
    expected = sum(1 / sources for sources in range(2, 14)) / 12
    assert summary.evenness == "1.000"
    assert summary.embedding == summary.newest == f"{expected:.3f}"


def test_importing_analysis_is_light():
    script = "import sys, attnres.analysis; assert not {'matplotlib', 'jinja2'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
