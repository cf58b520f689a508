"""Compile the CPU kernel once, keep it, and load it.

Compiled on the user's machine because the kernel lives from the machine's own vector instructions. The result is kept
under a name made of everything it depends on, so a new torch, compiler, processor or source makes a new one and an old
one is never loaded by mistake. It is written aside and renamed, under a lock, so that processes that start together
compile once and none sees half a file.
"""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from attnres.errors import BackendUnavailableError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

logger = logging.getLogger("attnres")

SOURCES = Path(__file__).parent
END = b"attnres: complete"  # what a compiled kernel ends with
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++20",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-fno-math-errno",
    "-Wno-psabi",
    "-DNDEBUG",
)

_loading = threading.Lock()
_problem: str | None = None
_tried = False


def problem() -> str | None:
    """Load the kernel, compiling it if need be; None when it is there, else the reason why it is not.

    The work is done once per process; a failure is logged then, and not repeated.
    """
    global _problem, _tried
    if _tried:
        return _problem
    with _loading:  # others wait for the first
        if not _tried:
            _problem = _load()
            _tried = True
    return _problem


def _load() -> str | None:
    try:
        torch.ops.load_library(_library())
    except (BackendUnavailableError, OSError, RuntimeError, ValueError) as error:  # no home folder is a RuntimeError
        logger.warning("no CPU kernel (%s); reads on CPU use the reference, which is several times slower", error)
        return str(error)
    return None


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``$ATTNRES_CACHE``, else ``attnres`` in the user's cache folder."""
    if folder := os.environ.get("ATTNRES_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnres"


def _library() -> Path:
    compiler = _compiler()
    path = cache_folder() / f"cpu-{_fingerprint(compiler)}.so"
    if not _whole(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock")):
            if not _whole(path):  # another process may have been faster
                _compile(compiler, path)
    return path


def _whole(path: Path) -> bool:
    """Whether the file is there to its end: the loader does not look, and half a library would kill the process."""
    try:
        with path.open("rb") as file:
            file.seek(-len(END), os.SEEK_END)
            return file.read() == END
    except OSError:
        return False


def _flags() -> list[str]:
    wide = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    return [*FLAGS, *wide]


def _compiler() -> list[str]:
    """The command of the compiler: ``$CXX``, which may have arguments, or the first that is found."""
    chosen = os.environ.get("CXX")
    candidates = [shlex.split(chosen)] if chosen else [[name] for name in COMPILERS]
    for name, *arguments in filter(None, candidates):
        if found := shutil.which(name):
            return [found, *arguments]
    raise BackendUnavailableError(f"no C++ compiler found; looked for {', '.join(map(shlex.join, candidates))}")


def _fingerprint(compiler: list[str]) -> str:
    parts = [torch.__version__, platform.machine(), _processor(), _output([*compiler, "--version"]), " ".join(_flags())]
    parts += [path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.*")) if path.suffix in (".h", ".cpp")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What distinguishes processors that need different code; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: list[str], path: Path) -> None:
    logger.warning("compiling the CPU kernel with %s, once; this takes about half a minute", shlex.join(compiler))
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        result = Path(folder) / "library.so"
        _output(
            [
                *compiler,
                *_flags(),
                *_torch_flags(),
                str(SOURCES / "library.cpp"),
                "-o",
                str(result),
                *_torch_libraries(),
            ]
        )
        with result.open("ab") as file:
            file.write(END)
        os.replace(result, path)


def _torch_flags() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    abi = int(torch.compiled_with_cxx11_abi())
    return [
        f"-I{include}",
        f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
    ]


def _torch_libraries() -> list[str]:
    """Torch's libraries, its OpenMP among them: another one would be a second pool of threads."""
    folder = Path(torch.__file__).parent / "lib"
    openmp = [str(path) for path in sorted(folder.glob("libgomp*.so*"))]
    return [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lc10", "-ltorch_cpu", *openmp]


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise BackendUnavailableError(f"{command[0]} failed: {lines[0].strip()[:200]}")
    return done.stdout


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
