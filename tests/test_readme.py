"""Every command and every Python block of the README and of the guide is run, as a reader would run them.

In document order and in one folder, so that later commands find what earlier ones made.
"""

import functools
import json
import re
import shlex
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from attnres.cli import main
from attnres.data.text import BundledText
from attnres.data.tokenizer import byte_tokenizer
from attnres.experiments.compare import compare
from documents import ROOT, code_blocks, commands, name, prose, run_python

README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "guides" / "train-and-compare.md"

# A reader's runs take minutes. The test appends these to train and compare (the last one of an option counts), so that
# the same commands, with all their own options, take a moment.
SMALL = shlex.split(
    "--train.steps 4 --train.eval-sequences 4 --train.batch-size 8 --data.context 32 --optim.warmup-steps 0 "
    "--model.num-hidden-layers 2"
)


def smaller(words: list[str]) -> list[str]:
    """The command with what makes it quick."""
    if words[0] == "compare" or (words[0] == "train" and "--resume" not in words):
        return [*words, *SMALL]
    if words[0] == "train" and "--train.steps" in words:  # a resumed run has its own settings
        return [*words, "--train.steps", "30"]
    if words[0] == "eval":
        return [*words, "--sequences", "4"]
    return words


def run_command(words: list[str]) -> None:
    """Run ``attnres`` through its real entry."""
    try:
        main(smaller(words))
    except SystemExit as stop:
        if stop.code not in (0, None):
            pytest.fail(f"attnres {shlex.join(words)} ended with status {stop.code}")


def check_make(words: list[str]) -> None:
    """Continuous integration runs these; here they must be targets that exist."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in words:
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"the Makefile has no target {target}"


def check_pip(words: list[str]) -> None:
    """Only the checkout itself, with extras that exist."""
    command, *options, package = words
    extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", package)
    assert (command, options) == ("install", ["-e"]), f"pip {shlex.join(words)}"
    assert extras is not None, f"pip {shlex.join(words)}"
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in filter(None, (extras[1] or "").split(",")):
        assert re.search(rf"^{extra} = \[", pyproject, re.MULTILINE), f"pyproject.toml has no extra {extra}"


def check_line(line: str) -> None:
    """Run or check one line; a line that fits no rule fails."""
    match shlex.split(line, comments=True):
        case ["attnres", *words]:
            run_command(words)
        case ["make", *targets]:
            check_make(targets)
        case ["pip", *words]:
            check_pip(words)
        case ["source", ".venv/bin/activate"]:
            assert "VENV := .venv" in (ROOT / "Makefile").read_text(encoding="utf-8")
        case ["git", "clone", _, "attnres"] | ["cd", "attnres"]:
            pass
        case _:
            pytest.fail(f"no rule for the line: {line}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the reader types: with texts of their own, and runs in this process instead of one each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("attnres.cli.compare.compare", functools.partial(compare, isolate=False, progress=False))
    text = next(iter(BundledText("train"))).text
    (tmp_path / "my-text").mkdir()
    (tmp_path / "my-text" / "novel.txt").write_text(text, encoding="utf-8")
    rows = "".join(json.dumps({"text": line}) + "\n" for line in text.splitlines())
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8")
    trained_model(tmp_path / "my-model")
    return tmp_path


def trained_model(folder: Path) -> None:
    """A small model with the vocabulary that the guide names, of which its tokenizer of bytes uses a few."""
    shape = LlamaConfig(
        vocab_size=49152, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    description = json.loads(byte_tokenizer().to_str())
    vocab = description["model"]["vocab"]
    vocab |= {f"<unused {index}>": index for index in range(len(vocab), 49152)}
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("document", [README, GUIDE], ids=name)
def test_every_command_and_python_block_runs(document: Path, folder: Path) -> None:
    for block in code_blocks(document, "sh", "python"):
        if block.language == "python":
            run_python(document, block)
            continue
        for line in commands(block):
            check_line(line)
    assert list(folder.glob("runs/*/report.html"))


def test_a_line_without_a_rule_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match="no rule"):
        check_line("curl example.org")


def test_a_command_that_fails_is_noticed() -> None:
    with pytest.raises(pytest.fail.Exception, match="status 2"):
        check_line("attnres eval no-such-folder")


def test_files_that_the_readme_mentions_exist() -> None:
    mentioned = re.findall(r"\b(?:docs|src|tests|results)/[\w./-]*\w", prose(README))
    assert mentioned
    assert [path for path in mentioned if not (ROOT / path).exists()] == []
