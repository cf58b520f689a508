"""Which implementation runs, what is said about it, and where the compiled CPU kernel comes from."""

import importlib
import logging
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from attnres.errors import BackendUnavailableError, ConfigError, ShapeError
from attnres.ops import backends, cpu, depth_attention, inter_block, intra_block, partial_softmax, use_backend
from attnres.ops.cpu import build

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def nothing_said_before(monkeypatch):
    monkeypatch.setattr(backends, "_said", set())


@pytest.fixture
def kernel():
    if reason := cpu.problem():
        pytest.skip(reason)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="attnres")
    return caplog


def rows(count=3, dtype=torch.float32):
    return [torch.randn(4, 8).to(dtype) for _ in range(count)]


# --- the choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtypes", "chosen"),
    [
        ([torch.float32], "cpu"),
        ([torch.bfloat16], "cpu"),
        ([torch.float32, torch.bfloat16], "cpu"),
        ([torch.float64], "reference"),
        ([torch.float16], "reference"),
        ([torch.float32, torch.float64], "reference"),
        ([torch.bfloat16, torch.float16], "reference"),
    ],
)
def test_auto_takes_the_kernel_where_it_can_and_the_reference_elsewhere(kernel, dtypes, chosen):
    sources = [torch.randn(4, 8).to(dtype) for dtype in [*dtypes, *dtypes]]
    assert backends.resolve("auto", sources) == chosen
    query = torch.randn(8)
    found = depth_attention(sources, query, dtype=dtypes[-1])
    expected = depth_attention(sources, query, dtype=dtypes[-1], backend="reference")
    assert found.dtype == dtypes[-1]
    torch.testing.assert_close(
        found.float(), expected.float(), rtol=2e-2 if dtypes[-1] == torch.bfloat16 else 1e-5, atol=1e-5
    )


@pytest.mark.parametrize("declared", [torch.float16, torch.float64])
@pytest.mark.parametrize("grad_mode", [True, False])
def test_a_result_in_a_dtype_that_the_kernel_does_not_have_comes_from_the_reference(kernel, declared, grad_mode):
    sources, query = rows(), torch.randn(8)
    with torch.set_grad_enabled(grad_mode):
        depth_attention(sources, query)
        found = depth_attention(sources, query, dtype=declared)
        assert torch.equal(found, depth_attention(sources, query, dtype=declared, backend="reference"))
        part = partial_softmax(sources, query)
        found = intra_block(part, sources[0], query, dtype=declared)
        expected = intra_block(part, sources[0], query, dtype=declared, backend="reference")
        torch.testing.assert_close(found, expected)
    with pytest.raises(BackendUnavailableError, match=f"have dtype .*{str(declared)[6:]}"):
        depth_attention(sources, query, dtype=declared, backend="cpu")
    with pytest.raises(BackendUnavailableError, match=f"have dtype .*{str(declared)[6:]}"):
        intra_block(part, None, query, dtype=declared, backend="cpu")


def test_the_choice_and_each_refusal_are_logged_once_with_the_reason(kernel, log):
    query = torch.randn(8)
    for _ in range(3):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            depth_attention(rows(dtype=dtype), query)
    assert [record.levelno for record in log.records] == [logging.INFO] * 2
    assert log.messages[0] == "depth attention uses the cpu kernel"
    assert log.messages[1].startswith("depth attention uses the reference, not the cpu kernel: ")
    assert "float16; it takes bfloat16, float32" in log.messages[1]
    log.clear()
    for _ in range(2):
        torch.func.vmap(lambda row: depth_attention([row, row], query))(torch.randn(4, 8))
    assert len(log.messages) == 1
    assert "torch.func" in log.messages[0]


def test_a_backend_asked_for_by_name_says_nothing(kernel, log):
    for name in ("reference", "cpu"):
        depth_attention(rows(), torch.randn(8), backend=name)
    assert not log.messages


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # of torch's own, in jvp
@pytest.mark.parametrize("grad_mode", [True, False])
def test_function_transforms_and_forward_derivatives_are_right(kernel, grad_mode):
    sources, query = rows(), torch.randn(8)
    tangents = rows()

    def ask(*sources):
        return depth_attention(sources, query)

    def expect(*sources):
        return depth_attention(sources, query, backend="reference")

    with torch.set_grad_enabled(grad_mode):
        plain = ask(*sources)  # from here on the kernel is in use
        torch.testing.assert_close(torch.func.vmap(ask)(*sources), plain, **TOLERANCE)
        value, tangent = torch.func.jvp(ask, tuple(sources), tuple(tangents))
        torch.testing.assert_close(value, plain, **TOLERANCE)
        torch.testing.assert_close(tangent, torch.func.jvp(expect, tuple(sources), tuple(tangents))[1])
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(*pair) for pair in zip(sources, tangents, strict=True)]
            assert torch.equal(torch.autograd.forward_ad.unpack_dual(ask(*duals)).tangent, tangent)
        grads = torch.func.grad(lambda *s: ask(*s).square().sum(), argnums=(0, 1, 2))(*sources)
        wanted = torch.func.grad(lambda *s: expect(*s).square().sum(), argnums=(0, 1, 2))(*sources)
        assert all(torch.equal(mine, other) for mine, other in zip(grads, wanted, strict=True))
        with pytest.raises(BackendUnavailableError, match=r"torch\.func transforms"):
            torch.func.vmap(lambda row: depth_attention([row, row], query, backend="cpu"))(sources[0])


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("triton", torch.float32, "the sources are on cpu; it takes cuda"),
        ("cpu", torch.float16, "it takes bfloat16, float32, or float64 alone"),
    ],
)
def test_a_backend_that_cannot_do_it_says_so_in_one_line(kernel, name, dtype, reason):
    sources, query = rows(dtype=dtype), torch.randn(8)
    part = partial_softmax(sources, query)
    calls = [
        lambda: depth_attention(sources, query, backend=name),
        lambda: depth_attention(sources[:1], query, backend=name),
        lambda: partial_softmax(sources, query, backend=name),
        lambda: inter_block(sources, query[None], backend=name),
        lambda: intra_block(part, sources[0], query, backend=name),
    ]
    for call in calls:
        for grad_mode in (True, False):
            with torch.set_grad_enabled(grad_mode), pytest.raises(BackendUnavailableError) as caught:
                call()
            text = str(caught.value)
            assert text.startswith(f"backend '{name}' is not available: ")
            assert reason in text
            assert "\n" not in text


def test_an_unknown_backend_is_named_with_the_ones_there_are():
    for ask in (
        lambda: depth_attention(rows(), torch.randn(8), backend="cuda"),
        lambda: use_backend("cuda").__enter__(),
    ):
        with pytest.raises(ConfigError, match=r"backend is 'cuda'; allowed: auto, reference, cpu, triton"):
            ask()


def test_use_backend_stands_for_auto_and_nothing_else_and_ends_with_its_block(kernel):
    sources, query = rows(), torch.randn(8)
    kernel_value = depth_attention(sources, query, backend="cpu")
    reference_value = depth_attention(sources, query, backend="reference")
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            depth_attention(sources, query)
            with use_backend("reference"):
                assert torch.equal(depth_attention(sources, query), reference_value)
                assert torch.equal(depth_attention(sources, query, backend="cpu"), kernel_value)
                with use_backend("cpu"):
                    assert backends.resolve("auto", rows(dtype=torch.float64)) == "cpu"
                    with pytest.raises(BackendUnavailableError, match="float16"):
                        depth_attention(rows(dtype=torch.float16), query)
                assert backends.resolve("auto", sources) == "reference"
                with use_backend("auto"):
                    assert backends.resolve("auto", sources) == "cpu"
            with pytest.raises(ZeroDivisionError), use_backend("reference"):
                raise ZeroDivisionError
            assert torch.equal(depth_attention(sources, query), kernel_value)


# --- the short path of inference ------------------------------------------------------------------------------------


@pytest.fixture
def inference(kernel):
    """Gradients off and the kernel in use, so that `depth_attention` tries the operator `read` first."""
    with torch.no_grad():
        depth_attention(rows(), torch.randn(8))
        assert backends.in_reach("auto", rows())
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inference_takes_the_short_path_and_gives_the_bits_of_the_long_one(inference, monkeypatch, dtype):
    sources, query, key = rows(5, dtype), torch.randn(8), torch.randn(8)
    options = {"eps": 1e-3, "out_scale": 2.5}
    expected = depth_attention(sources, query, key, backend="cpu", **options)
    module = importlib.import_module("attnres.ops.depth_attention")
    monkeypatch.setattr(module, "resolve", lambda *_: pytest.fail("took the long path"))
    assert torch.equal(depth_attention(sources, query, key, **options), expected)
    with torch.enable_grad(), pytest.raises(pytest.fail.Exception):
        depth_attention(sources, query, key, **options)


BAD_CALLS = {
    "no sources": lambda: ([], torch.ones(8)),
    "a longer source": lambda: ([torch.ones(4, 8), torch.ones(5, 8)], torch.ones(8)),
    "a wider source": lambda: ([torch.ones(4, 8), torch.ones(4, 9)], torch.ones(8)),
    "a source that would broadcast": lambda: ([torch.ones(4, 8), torch.ones(1, 8)], torch.ones(8)),
    "two dtypes": lambda: ([torch.ones(4, 8), torch.ones(4, 8).bfloat16()], torch.ones(8)),
    "two dtypes, half first": lambda: ([torch.ones(4, 8).bfloat16(), torch.ones(4, 8)], torch.ones(8)),
    "a wide query": lambda: (rows(), torch.ones(9)),
    "a query that would broadcast": lambda: (rows(), torch.ones(1)),
    "a matrix of queries": lambda: (rows(), torch.ones(2, 8)),
    "a wide key weight": lambda: (rows(), torch.ones(8), torch.ones(9)),
    "integer sources": lambda: ([torch.ones(4, 8, dtype=torch.int64)] * 2, torch.ones(8)),
    "one integer source": lambda: ([torch.ones(4, 8), torch.ones(4, 8, dtype=torch.int32)], torch.ones(8)),
    "scalars": lambda: ([torch.tensor(1.0)] * 2, torch.ones(8)),
}


@pytest.mark.parametrize("bad", BAD_CALLS)
def test_inference_raises_the_errors_of_training(inference, bad):
    texts = []
    for backend, grad_mode in (("auto", False), ("auto", True), ("reference", True)):
        with torch.set_grad_enabled(grad_mode), pytest.raises(ShapeError) as caught:
            depth_attention(*BAD_CALLS[bad](), backend=backend)
        texts.append(str(caught.value))
    assert len(set(texts)) == 1


def test_inference_with_what_the_kernel_cannot_read_comes_from_the_reference(inference):
    mixed = [torch.randn(4, 8), torch.randn(4, 8).half(), torch.randn(4, 8).double()]
    for declared in (torch.float32, torch.float16):
        found = depth_attention(mixed, torch.ones(8), dtype=declared)
        assert torch.equal(found, depth_attention(mixed, torch.ones(8), dtype=declared, backend="reference"))


# --- second derivatives ---------------------------------------------------------------------------------------------


def test_second_derivatives_through_a_kernel_are_refused_with_the_way_out(kernel):
    sources, query = rows(), torch.randn(8)
    leaves = [tensor.requires_grad_() for tensor in (*sources, query)]
    part = partial_softmax(sources, query, backend="cpu")
    for value in (
        depth_attention(sources, query, backend="cpu"),
        part.mixed,
        intra_block(part, sources[0], query, backend="cpu"),
    ):
        grads = torch.autograd.grad(value.square().sum(), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match=r'backend="reference", or inside attnres\.ops\.use_backend'):
            torch.autograd.grad(grads[-1].sum(), leaves)


def test_second_derivatives_of_the_reference_are_right():
    leaves = [tensor.double().requires_grad_() for tensor in (*rows(2), torch.randn(8))]

    def ask(*leaves):
        with use_backend("reference"):
            return depth_attention(leaves[:-1], leaves[-1], eps=1e-3)

    assert torch.autograd.gradgradcheck(ask, leaves)


# --- compiling the kernel -------------------------------------------------------------------------------------------

READ = """
import logging
import torch
from attnres.errors import BackendUnavailableError
from attnres.ops import cpu, depth_attention
torch.manual_seed(0)
sources, query = [torch.randn(4, 8) for _ in range(3)], torch.randn(8)
reference = depth_attention(sources, query, backend="reference")
for _ in range(2):
    value = depth_attention(sources, query)
    torch.testing.assert_close(value, reference)
print("same bits as the reference:", torch.equal(value, reference))
for _ in range(2):
    try:
        depth_attention(sources, query, backend="cpu")
        print("cpu works")
    except BackendUnavailableError as error:
        print("cpu:", error)
"""
MISSING = "no CPU kernel ("


def environment(**settings):
    return os.environ | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in settings.items()}


def start(**settings):
    return subprocess.Popen(
        [sys.executable, "-c", READ],
        env=environment(**settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return out, err


def works_without(reason, **settings):
    """The reads are those of the reference, a warning with the reason comes once, and asking by name raises it."""
    out, err = finish(start(**settings))
    assert "same bits as the reference: True" in out
    assert out.count(f"cpu: backend 'cpu' is not available: {reason}") == 2
    assert err.count(MISSING) == 1
    assert f"{MISSING}{reason}" in err


def works_with_the_kernel(process):
    out, err = finish(process)
    assert out.count("cpu works") == 2
    assert MISSING not in err
    return err


@pytest.fixture
def compiler(kernel, tmp_path):
    """A compiler that takes its time, notes each compilation, and delivers the kernel that this process uses."""
    script, notes = tmp_path / "compiler", tmp_path / "notes"
    script.write_text(
        textwrap.dedent(f"""\
            #!/bin/sh
            case "$1" in --version) echo "a compiler"; exit 0;; esac
            echo compiled >> "{notes}"
            sleep 1
            while [ $# -gt 0 ]; do
              if [ "$1" = -o ]; then cp "{build._library()}" "$2"; fi
              shift
            done
            """)
    )
    script.chmod(0o755)
    return script, lambda: notes.read_text().count("compiled")


def test_without_a_compiler_everything_works_and_the_reason_is_said_once(tmp_path):
    works_without("no C++ compiler found; looked for c++, g++, clang++", PATH=tmp_path, CXX="", ATTNRES_CACHE=tmp_path)
    works_without("no C++ compiler found; looked for /no/such", CXX="/no/such", ATTNRES_CACHE=tmp_path)


def test_a_compiler_that_fails_is_quoted(tmp_path):
    script = tmp_path / "failing"
    script.write_text('#!/bin/sh\ncase "$1" in --version) exit 0;; esac\necho "x.cpp:1: error: no luck" >&2\nexit 1\n')
    script.chmod(0o755)
    works_without(f"{script} failed: x.cpp:1: error: no luck", CXX=script, ATTNRES_CACHE=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    works_without("", ATTNRES_CACHE=tmp_path / "file" / "cache")


def test_processes_that_start_together_compile_once_and_a_later_one_not_at_all(compiler, tmp_path):
    script, compilations = compiler
    settings = {"CXX": script, "ATTNRES_CACHE": tmp_path / "new" / "cache"}
    for process in [start(**settings), start(**settings)]:
        works_with_the_kernel(process)
    assert compilations() == 1
    assert "compiling the CPU kernel" not in works_with_the_kernel(start(**settings))
    assert compilations() == 1
    left = {path.suffix for path in (tmp_path / "new" / "cache").iterdir()}
    assert left == {".so", ".lock"}


@pytest.mark.parametrize("kept", [0, 20, 0.5, 0.999], ids=str)
def test_a_damaged_kernel_in_the_cache_is_compiled_anew(compiler, tmp_path, monkeypatch, kept):
    script, compilations = compiler
    settings = {"CXX": script, "ATTNRES_CACHE": tmp_path}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    path = build._library()
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept if kept > 1 else kept * len(whole))])
    if kept == 0.5:  # the one that would bring a process down
        works_with_the_kernel(start(**settings))
    else:
        assert build._library() == path
        assert path.read_bytes() == whole
    assert compilations() == 2


def test_a_kernel_that_does_not_load_is_no_error(tmp_path):
    script = tmp_path / "compiler"
    script.write_text('#!/bin/sh\nwhile [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo junk > "$2"; fi; shift; done\n')
    script.chmod(0o755)
    works_without("Could not load this library", CXX=script, ATTNRES_CACHE=tmp_path)


def test_the_name_of_a_kernel_depends_on_all_that_it_is_made_of(monkeypatch, tmp_path):
    compilers = [tmp_path / name for name in ("one", "two")]
    for path in compilers:
        path.write_text(f"#!/bin/sh\necho {path.name}\n")
        path.chmod(0o755)
    names = {build._fingerprint([str(path)]) for path in compilers}
    assert build._fingerprint([str(compilers[0])]) in names
    changes = [(torch, "__version__", "9"), (build, "FLAGS", ()), (build, "_processor", lambda: "another")]
    for where, what, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(where, what, value)
            names.add(build._fingerprint([str(compilers[0])]))
    (tmp_path / "changed.h").write_text("int x;\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    names.add(build._fingerprint([str(compilers[0])]))
    assert len(names) == 6


def test_where_kernels_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNRES_CACHE", str(tmp_path / "own"))
    assert build.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("ATTNRES_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_folder() == tmp_path / "xdg" / "attnres"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / ".cache" / "attnres"


def test_importing_the_operators_compiles_and_loads_nothing(tmp_path):
    code = "import sys, attnres.ops; sys.exit('attnres.ops.cpu' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(ATTNRES_CACHE=tmp_path), check=False)
    assert done.returncode == 0
    assert not list(tmp_path.iterdir())
