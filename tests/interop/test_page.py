"""docs/interop.md keeps its word: its commands run after its example, and its numbers are measured again."""

import re
import shlex

import pytest

from attnres.cli import main
from documents import ROOT, code_blocks, commands, run_python
from interop.folders import assert_same, read_config, read_tensors
from interop.test_quantisation import weight_change

PAGE = ROOT / "docs" / "interop.md"


def test_the_example_and_then_every_command_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_python(PAGE, code_blocks(PAGE, "python")[0])
    capsys.readouterr()
    (block,) = code_blocks(PAGE, "sh")
    for line in commands(block):
        program, *words = shlex.split(line)
        assert program == "attnres"
        main(words)
    assert capsys.readouterr().out == "imported-too: imported from kimi-k3\nback-too: exported to kimi-k3\n"
    assert_same(read_tensors(tmp_path / "back-too"), read_tensors(tmp_path / "kimi-k3-small"))
    assert read_config(tmp_path / "back-too") == read_config(tmp_path / "back")


MISTAKES = {
    "import nowhere here": "nowhere is not a folder",
    "import nowhere here --kind gguf": "attnres import --help",
    "export nowhere here": "nowhere is not a folder",
    "export nowhere": "attnres export --help",
    "import nowhere .": ". exists already",
}


@pytest.mark.parametrize(("line", "message"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_on_the_command_line_is_one_line_and_status_2(tmp_path, monkeypatch, capsys, line, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(shlex.split(line))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("attnres: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("outlier", "label"), [(1, "as drawn"), (5, "5 times the next"), (20, "20 times the next")])
def test_the_weight_change_in_the_table_is_what_is_measured(outlier, label):
    row = re.search(
        rf"^\| {label} \| ([\d.]+) \| ([\d.]+) \| (\d+) % \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert row is not None
    change, flipped = weight_change(margin=0.02, outlier=outlier)
    assert float(row[1]) == pytest.approx(change.mean().item(), abs=1e-3)
    assert float(row[2]) == pytest.approx(change.max().item(), abs=2e-3)
    assert float(row[3]) == pytest.approx(100 * flipped.item(), abs=1)


def test_the_families_in_the_text_are_those_of_the_library():
    from interop import fla_models

    fla_models.modules()
    from fla import models

    text = PAGE.read_text(encoding="utf-8").partition("is taken by 29 of its families: ")[2].partition(". ")[0]
    told = set(re.split(r",\s+", " ".join(text.split())))
    configs = [getattr(models, name) for name in dir(models) if name.endswith("Config")]
    taking = {config.model_type for config in configs if "attnres_block_size" in config.__init__.__code__.co_varnames}
    assert told == taking
    assert len(told) == 29
