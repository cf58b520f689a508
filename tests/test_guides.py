"""The guides keep their word: their blocks and commands run in order, in one folder."""

import os
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
def test_the_guide_to_several_devices_runs_in_order(tmp_path):
    guide = ROOT / "docs" / "guides" / "distributed.md"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    programs = {"torchrun": ["-m", "torch.distributed.run"], "attnres": ["-m", "attnres"]}
    printed = ""
    for block in code_blocks(guide, "python", "sh"):
        if block.language == "python":  # a script, which the next command runs on several processes
            name = block.text.partition("\n")[0].removeprefix("# ")
            (tmp_path / name).write_text(block.text)
            continue
        for line in commands(block):
            program, *words = shlex.split(line)
            command = [sys.executable, *programs[program], *words]
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=240
            )
            assert done.returncode == 0, f"{line}\n{done.stderr[-1500:]}"
            printed += done.stdout
    assert "rank 1: sent 65,536 bytes, holds 0" in printed
    assert "rank 1: 17 tokens, 8 of them its own" in printed
    assert (tmp_path / "runs" / "mesh-hf" / "config.json").is_file()


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
