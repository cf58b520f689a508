"""Where a result comes from: the checkout that ran, and the processor. Knows nothing of the rest of the package."""

import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def checkout(exclude: Sequence[str] = ()) -> tuple[str, bool] | None:
    """Hash of the checkout that this package runs from, and whether it has changes; None for an installed package.

    Changes below the folders ``exclude`` do not count, nor do files that git does not know.
    """
    if not (_ROOT / ".git").exists():  # not just any repository above us: an environment may lie inside one
        return None
    revision = _git("rev-parse", "HEAD")
    if not revision:
        return None
    elsewhere = (".", *(f":(exclude){folder}" for folder in exclude))
    return revision, bool(_git("status", "--porcelain", "--untracked-files=no", "--", *elsewhere))


def cpu_model() -> str:
    """Model name of the processor, as far as the system says."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
