"""docs/conformance.md: its table is the committed result, verdicts are still the same, each failure is reproduced."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from attnres.testing import CHECKS, run
from attnres.testing.adapters import OURS, SHIPPED
from attnres.testing.process import Running
from attnres.testing.report import BEGIN, END, from_json, markdown
from attnres.testing.suite import select
from documents import ROOT
from testing.broken_models import MODELS
from testing.broken_reads import READS

PAGE = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
REPORT = from_json((ROOT / "docs" / "conformance.json").read_text(encoding="utf-8"))
VERDICTS = {verdicts.name: verdicts for verdicts in REPORT.verdicts}
IN_PROCESS = ["reference", "cpu", "fla-naive", "attn-res", "inkling2", "inkling2-as-kimi"]
BY_PROCESSOR = "locality.chunk_bits"
"""Whose verdict on code that makes no promise of bits is up to the processor's matrix products."""

SECTIONS = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL))
SCRIPT = re.compile(r"^(`[\w.]+`(?:,\s`[\w.]+`)*):.*?^```py\n(.*?)^```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
SCRIPTS = [
    (f"{name}-{checks.split('`')[1]}", checks, code, printed)
    for name, text in SECTIONS.items()
    for checks, code, printed in SCRIPT.findall(text)
]


def statuses(verdicts):
    return {outcome.check: outcome.status for outcome in verdicts.outcomes}


def test_the_table_on_the_page_is_the_committed_result():
    assert PAGE.partition(BEGIN)[2].partition(END)[0].strip() == markdown(REPORT)


def test_the_committed_result_is_of_all_checks_and_of_all_adapters():
    assert {name for verdicts in REPORT.verdicts for name in statuses(verdicts)} == set(CHECKS)
    assert len(REPORT.verdicts) + len(REPORT.missing) == len(SHIPPED)


def test_our_own_backends_pass_every_check():
    ours = [verdicts for name, verdicts in VERDICTS.items() if name.startswith("attnres ")]
    assert len(ours) == len(OURS)
    assert all(not verdicts.failures for verdicts in ours)


@pytest.mark.parametrize("name", IN_PROCESS)
def test_verdicts_are_still_the_same(name):
    problem = SHIPPED[name].problem()
    if problem is not None:
        pytest.skip(problem)
    now = run(SHIPPED[name].make())
    then = VERDICTS[now.name]
    if now.version != then.version:
        pytest.skip(f"{now.name} is {now.version}, the page is about {then.version}")
    today, page = statuses(now), statuses(then)
    if name not in OURS:
        assert {today.pop(BY_PROCESSOR), page.pop(BY_PROCESSOR)} <= {"pass", "fail"}
    assert today == page


@pytest.mark.slow
@pytest.mark.parametrize("name", ["triton", "liger"])
def test_verdicts_of_interpreted_kernels_are_still_the_same(name):
    problem = SHIPPED[name].problem()
    if problem is not None or not SHIPPED[name].needs_interpreter:
        pytest.skip(problem or "runs on a GPU here")
    now = Running(SHIPPED[name], select()).verdicts()
    assert statuses(now) == statuses(VERDICTS[now.name])


def test_a_child_process_gives_the_verdicts_of_an_interpreted_kernel():
    if find_spec("triton") is None or not SHIPPED["triton"].needs_interpreter:
        pytest.skip("needs triton and no GPU")
    verdicts = Running(SHIPPED["triton"], select(["value.score_scale", "dtype.result", "determinism.value"])).verdicts()
    assert [outcome.status for outcome in verdicts.outcomes] == ["pass", "pass", "n/a"]
    assert verdicts.runs_on == "Triton interpreter"


@pytest.mark.parametrize("name", [name for name, verdicts in VERDICTS.items() if verdicts.failures])
def test_each_failure_of_a_peer_has_a_script(name):
    failed = {outcome.check for outcome in VERDICTS[name].failures}
    explained = {
        check for checks, *_ in SCRIPT.findall(SECTIONS[name]) for check in re.findall(r"`([a-z_0-9.]+)`", checks)
    }
    if "fails along with this one" in SECTIONS[name]:
        assert explained < failed
    else:
        assert explained == failed


@pytest.fixture(scope="module")
def outputs():
    """What the scripts print; in two processes, for Triton is either itself or its interpreter for the whole of one."""
    codes = [code for *_, code, _ in SCRIPTS if not missing(code)]
    groups = [[code for code in codes if ("TRITON_INTERPRET" in code) == interpreted] for interpreted in (False, True)]
    return {code: printed for group in groups for code, printed in zip(group, _run(group), strict=True)}


def missing(code):
    """The first package of a script that is not installed."""
    packages = re.findall(r"^from (\w+)", code, re.MULTILINE)
    return next((package for package in packages if find_spec(package) is None), None)


RUNNER = """
import contextlib, io, json, sys
printed = []
for code in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {"__name__": "__main__"})
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def _run(codes):
    settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(codes),
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(("checks", "code", "printed"), [script[1:] for script in SCRIPTS], ids=[s[0] for s in SCRIPTS])
def test_each_script_prints_what_the_page_says(checks, code, printed, outputs):
    if missing(code) is not None:
        pytest.skip(f"{missing(code)} is not installed")
    assert len(code.strip().splitlines()) <= 5
    if BY_PROCESSOR in checks:
        assert outputs[code].strip() in ("True False", "True True")
    else:
        assert outputs[code] == printed


def test_deviations_name_checks_that_a_broken_implementation_fails():
    table = PAGE.partition("## Deviations that the suite knows")[2].partition("\n## ")[0]
    named = set().union(*READS.values(), *MODELS.values())
    rows = [line for line in table.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) > 20
    for row in rows:
        assert set(re.findall(r"`([a-z_]+\.[a-z_0-9]+)`", row)) <= named, row
