"""The guides on conversion and inference keep their word: their blocks and commands run in order, in one folder."""

import re
import shlex
import subprocess
import sys

import pytest

from attnres.cli import main
from documents import ROOT, code_blocks, commands, run_python

GUIDES = [ROOT / "docs" / "guides" / name for name in ("convert.md", "inference.md")]
NOISE = "ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"  # in PEFT


@pytest.mark.slow
@pytest.mark.filterwarnings(NOISE)
@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_every_block_of_a_guide_runs_in_order(guide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = code_blocks(guide, "python", "sh")
    assert {block.language for block in blocks} == {"python", "sh"}
    for block in blocks:
        if block.language == "python":
            run_python(guide, block)
            continue
        for line in commands(block):
            program, *words = shlex.split(line)
            assert program == "attnres", line
            main(words)


@pytest.mark.slow
def test_what_convert_prints_in_the_guide_is_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    guide = GUIDES[0]
    run_python(guide, code_blocks(guide, "python")[0])
    (line, *_), (shown,) = commands(code_blocks(guide, "sh")[0]), code_blocks(guide, "text")
    capsys.readouterr()
    main(shlex.split(line)[1:])

    def words(text):
        return re.sub(r"\d[\d.e-]*", "#", text).split()

    printed = capsys.readouterr().out
    assert words(printed) == words(shown.text)
    assert printed.splitlines()[0] == shown.text.splitlines()[0]


@pytest.mark.slow
def test_lm_eval_starts_as_the_guide_says():
    code = re.search(r'python -c "(import attnres; from lm_eval[^"]*)"', GUIDES[1].read_text(encoding="utf-8"))
    assert code is not None
    command = [sys.executable, "-W", "ignore", "-c", code[1], "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    assert "lm" in done.stdout
