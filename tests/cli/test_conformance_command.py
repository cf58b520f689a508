"""``attnres conformance`` as a user calls it."""

import json

import pytest

from attnres.cli import main
from documents import ROOT, code_blocks

PAGE = ROOT / "docs" / "conformance.md"


@pytest.fixture
def mine(tmp_path):
    """The page's example of an adapter, as a file."""
    (example,) = code_blocks(PAGE, "python")
    file = tmp_path / "mine.py"
    file.write_text(example.text, encoding="utf-8")
    return file


def call(*arguments):
    """The exit status."""
    try:
        main(["conformance", *map(str, arguments)])
    except SystemExit as stop:
        return stop.code
    return 0


def fails(capsys, *arguments):
    """The one line that a wrong call prints."""
    assert call(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    return printed.err


def test_the_example_of_the_page_passes_and_its_parts_are_counted(mine, capsys, tmp_path):
    assert call("--adapter", mine, "--json", tmp_path / "out.json") == 0
    printed = capsys.readouterr().out
    assert "schedule.members" in printed
    assert " 0 fail, 6 n/a" in printed
    (verdicts,) = json.loads((tmp_path / "out.json").read_text())["adapters"]
    assert {outcome["where"] for outcome in verdicts["outcomes"] if outcome["status"] == "n/a"} == {
        "no form for several queries",
        "no two-phase form",
    }


def test_a_fault_gives_exit_status_1_with_the_number_seen_and_expected(mine, capsys):
    mine.write_text(mine.read_text().replace("torch.rsqrt(", "0.125 * torch.rsqrt("))
    assert call("--adapter", mine, "--check", "value.score_scale", "init") == 1
    row = next(line for line in capsys.readouterr().out.splitlines() if "value.score_scale" in line)
    assert [cell.strip() for cell in row.split("│")[2:6]] == ["fail", "factor on the scores", "0.125", "1"]


def test_json_goes_to_standard_output_alone(capsys):
    assert call("--adapter", "reference", "--check", "schedule", "--json", "-") == 0
    made = json.loads(capsys.readouterr().out)
    assert [outcome["status"] for outcome in made["adapters"][0]["outcomes"]] == ["pass"] * 5
    assert set(made["versions"]) == {"attnres", "torch"}


def test_several_implementations_are_one_table(mine, capsys):
    assert call("--adapter", "reference", f"{mine}:Mine", "--check", "value") == 0
    printed = capsys.readouterr().out
    assert "attnres reference" in printed
    assert "mine" in printed


def test_checks_and_adapters_are_listed(capsys):
    assert call("--list") == 0
    printed = capsys.readouterr().out
    assert "value.eps" in printed
    assert "inkling2-as-kimi" in printed
    assert call("--list", "--check", "init") == 0
    assert "value.eps" not in capsys.readouterr().out


def test_all_names_what_cannot_run_here(capsys, monkeypatch):
    from attnres.testing import adapters

    shipped = {name: adapters.SHIPPED[name] for name in ("reference", "fla-fused")}
    monkeypatch.setattr(adapters, "SHIPPED", shipped)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert call("--all", "--check", "init") == 0
    assert "not run: fla-fused (needs a GPU)" in capsys.readouterr().out


def test_targets_are_checked_before_anything_is_run(mine, capsys, tmp_path):
    (tmp_path / "plain.md").write_text("nothing")
    for option, target, message in (
        ("--json", tmp_path, "which is a folder"),
        ("--json", tmp_path / "none" / "out.json", "there is no folder"),
        ("--page", tmp_path / "none.md", "there is no such file"),
        ("--page", tmp_path / "plain.md", "has no place for verdicts"),
    ):
        assert message in fails(capsys, "--adapter", mine, option, target)


def test_only_what_follows_from_the_paper_can_be_asked_for(mine, capsys):
    assert call("--adapter", mine, "--check", "dtype.result", "value.eps") == 0
    printed = capsys.readouterr().out
    assert "dtype.result*" in printed
    assert "* a promise of attnres beyond the paper's formulas" in printed
    assert "\nmine, held to kimi" in printed
    assert call("--list", "--check", "definition") == 0
    assert "contract" not in capsys.readouterr().out


def test_mistakes_are_told_in_one_line(mine, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "give either --adapter" in fails(capsys)
    assert "give either --adapter" in fails(capsys, "--all", "--adapter", mine)
    assert "check is 'speed'" in fails(capsys, "--all", "--check", "speed")
    assert "adapter is 'nothing'; allowed: reference, cpu" in fails(capsys, "--adapter", "nothing")
    assert "no such file" in fails(capsys, "--adapter", "nothing.py")
    assert "adapter fla-fused cannot run here: needs a GPU" in fails(capsys, "--adapter", "fla-fused")
