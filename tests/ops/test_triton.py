"""The Triton backend: what can be said of it without a GPU.

Results come from Triton's interpreter (`triton_cases.py`), validity for a GPU from compiling every kernel to machine
code for sm_90 (`triton_offline.py`); each runs in a process of its own. Speed needs a GPU and is not tested here.
"""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from attnres.errors import BackendUnavailableError
from attnres.ops import triton as backend
from ops.triton_interpreter import HERE, run_cases

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton has no wheel for this platform")


@needs_triton
def test_registered_operators_agree_with_the_reference():
    run_cases(str(HERE / "triton_cases.py"), "-k", "registered")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("cases", ["phase", "not phase and not registered"])
def test_kernels_agree_with_the_reference(cases):
    run_cases(str(HERE / "triton_cases.py"), "-k", cases)


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_a_gpu_without_spills_and_with_wide_accesses(tmp_path):
    done = subprocess.run(
        [sys.executable, str(HERE / "triton_offline.py"), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


def test_importing_the_backend_loads_no_kernel():
    code = "import sys, attnres.ops.triton; sys.exit('attnres.ops.triton.launch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
def test_a_machine_without_a_gpu_is_told_so():
    assert backend.unavailable() in ("torch sees no CUDA device", "the package triton is not installed")
    assert backend.supported([torch.ones(2, 4)]) == backend.unavailable()
    with pytest.raises(BackendUnavailableError, match=r"cannot run here: (torch sees no|the package triton)"):
        backend.register()


@pytest.mark.parametrize(
    ("missing", "reason"), [("triton", "not installed"), ("device", "no CUDA device"), ("capability", "need 8.0")]
)
def test_the_reason_names_what_is_missing(monkeypatch, missing, reason):
    monkeypatch.setattr("attnres.ops.triton.support.find_spec", lambda name: None if missing == "triton" else name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: missing != "device")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    assert reason in backend.unavailable()


def test_sources_that_the_kernels_cannot_read_are_named(monkeypatch):
    monkeypatch.setattr("attnres.ops.triton.support.unavailable", lambda: None)
    assert "source 0 is on cpu" in backend.supported([torch.ones(2, 4)])
    odd = torch.ones(2, 4, dtype=torch.float8_e5m2, device="meta")
    monkeypatch.setattr("attnres.ops.triton.support.DEVICE", "meta")
    assert "source 1 has dtype torch.float8_e5m2" in backend.supported([torch.ones(2, 4, device="meta"), odd])
