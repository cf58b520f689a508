"""``attnres plan`` on the command line: what it prints, what it refuses, and that its guide and results are its own."""

import json
import shlex

import pytest

from attnres.cli import main
from documents import ROOT, code_blocks, commands

GUIDE = ROOT / "docs" / "guides" / "plan.md"
RESULTS = ROOT / "results" / "planner"
SMALL = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


def _run(capsys, *arguments):
    capsys.readouterr()
    main(["plan", *arguments])
    return capsys.readouterr().out


def test_every_layout_fits_120_columns(capsys, config):
    for layout in (
        ["--model", "kimi-k3", "--pipeline", "8", "--virtual", "4", "--tensor", "8", "--microbatches", "64"],
        ["--model", "llama-3.1-70b", "--pipeline", "16", "--microbatches", "16", "--residual", "full"],
        ["--config", config],
    ):
        printed = _run(capsys, *layout)
        assert max(map(len, printed.splitlines())) <= 120
        assert "…" not in printed


def test_the_json_has_the_numbers_that_the_tables_show(capsys, config):
    arguments = [
        "--config",
        config,
        "--residual",
        "block:sublayers_per_block=2",
        "--pipeline",
        "2",
        "--microbatches",
        "4",
    ]
    report = json.loads(_run(capsys, *arguments, "--json"))
    assert report["request"]["residual"] == "Block AttnRes (S=2)"
    assert report["request"]["schedule"] == "1F1B"
    assert report["request"]["cuts"] == [4]
    values = {row["name"]: row["value"] for row in report["tables"]["parameters"]["rows"]}
    assert values["total"] == 96 * 32 * 2 + 4 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 48 + 64) + 32 + 9 * 64
    assert values["residual path"] == 9 * 64
    printed, markdown = _run(capsys, *arguments), _run(capsys, *arguments, "--markdown")
    assert f"{values['total'] / 1e3:.4g} k" in printed
    for table in report["tables"].values():
        assert table["title"] in printed
        assert f"## {table['title']}\n" in markdown


def test_the_timeline_has_every_event_of_every_arm(capsys, config, tmp_path):
    file = tmp_path / "timeline.json"
    arguments = ["--pipeline", "2", "--virtual", "2", "--microbatches", "4", "--timeline", str(file)]
    _run(capsys, "--config", config, *arguments, "--residual", "full")
    arms = json.loads(file.read_text())
    assert set(arms) == {"prenorm", "all", "received", "off"}
    for arm in arms.values():
        assert len(arm["events"]) == 4 * 4 * 2
        assert len(arm["transfers"]) == 3 * 4 * 2
        assert max(event["end"] for event in arm["events"]) == arm["seconds"]
        assert {event["rank"] for event in arm["events"]} == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "neither model nor config is given; allowed: one of the two"),
        (["--model", "kimi-k4"], "model is 'kimi-k4'; allowed: kimi-linear-48b, kimi-k3, llama-3.1-8b"),
        (["--model", "kimi-k3", "--gpu", "tpu"], "gpu is 'tpu'; allowed: h100, h200"),
        (["--model", "kimi-k3", "--pipeline", "100", "--virtual", "2"], "200 stages, but the model has 186 sublayers"),
        (["--model", "kimi-k3", "--schedule", "fast"], "schedule is 'fast'; allowed: gpipe, 1f1b"),
        (["--model", "kimi-k3", "--residual", "blocks"], "arm is 'blocks'; allowed: full, block"),
        (["--model", "kimi-k3", "--efficiency.compute", "2"], "compute efficiency is 2.0; allowed: above 0, up to 1"),
        (["--model", "kimi-k3", "--json", "--markdown"], "both --json and --markdown are given"),
        (["--config", "nowhere/config.json"], "config is nowhere/config.json; it cannot be read (No such file"),
        (["--model", "kimi-k3", "--timeline", "nowhere/t.json"], "nowhere/t.json: No such file or directory"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, told):
    with pytest.raises(SystemExit) as stop:
        main(["plan", *arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "nothing"}, "Transformers cannot use this model config"),
        ({"num_attention_heads": 5}, "Transformers cannot use this model config"),
        ({"model_type": None}, "allowed: a config.json with a model_type"),
        ({"model_type": "qwen3_next"}, "Qwen3NextModel is no known family"),
    ],
)
def test_a_config_that_cannot_be_used_is_one_line(capsys, tmp_path, changes, told):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**SMALL, **changes}))
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--config", str(file)])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_the_commands_of_the_guide_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    lines = [line for block in code_blocks(GUIDE, "sh") for line in commands(block)]
    assert len(lines) >= 4
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "attnres", line
        main(words)
        assert capsys.readouterr().out


def _recorded():
    for block in code_blocks(RESULTS / "README.md", "sh"):
        for line in commands(block):
            command, arrow, file = line.partition(" > ")
            if arrow:
                yield pytest.param(shlex.split(command)[1:], file, id=file)


@pytest.mark.parametrize(("words", "file"), [*_recorded()])
def test_committed_plans_are_what_the_command_prints_today(capsys, words, file):
    main(words)
    printed, kept = capsys.readouterr().out, (ROOT / file).read_text(encoding="utf-8")
    if file.endswith(".json"):
        assert _close(json.loads(printed), json.loads(kept))
    else:
        assert printed == kept


def _close(one, other):
    """Equal, but for how a Python version adds up numbers."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_close, one, other))
    return one == pytest.approx(other, rel=1e-9, abs=1e-12) if isinstance(one, float) else one == other


def test_the_table_of_what_depends_on_what_is_what_the_command_says_today(capsys):
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    base = next(parameter.values[0] for parameter in _recorded())
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ") and " % |" in line]
    assert len(rows) > 10
    for changed, *shares in rows:
        options = shlex.split(changed.strip(" `")) if "`" in changed else []
        main([*base, *options])
        report = json.loads(capsys.readouterr().out)
        found = {row["name"]: row["value"] for row in report["tables"]["overhead"]["rows"]}
        names = ("overhead", "residual traffic", "bubbles", "communication")
        assert [f"{100 * found[name]:.2f} %" for name in names] == [share.strip() for share in shares], changed
