"""Running a shipped adapter: here, or in a child process with Triton's interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from attnres.errors import AttnResError
from attnres.testing.adapters import Shipped
from attnres.testing.registry import Check
from attnres.testing.report import verdicts_from_dict
from attnres.testing.suite import Verdicts, run


class Running:
    """A shipped adapter at work. What runs in a child process starts at once; `verdicts` waits for it."""

    def __init__(self, shipped: Shipped, checks: Sequence[Check]):
        self.shipped, self.checks = shipped, checks
        self.child = _start(shipped, checks) if shipped.needs_interpreter else None

    def verdicts(self) -> Verdicts:
        """The outcomes.

        Raises:
            AttnResError: The child process died; with the end of what it said.
        """
        if self.child is None:
            return run(self.shipped.make(), self.checks)
        out, err = self.child.communicate()
        if self.child.returncode:
            raise AttnResError(f"checking {self.shipped.name} in Triton's interpreter failed: {err.strip()[-500:]}")
        return verdicts_from_dict(json.loads(out))

    def stop(self) -> None:
        """End the child process, if there is one and it still runs."""
        if self.child is not None and self.child.poll() is None:
            self.child.kill()
            self.child.communicate()


def _start(shipped: Shipped, checks: Sequence[Check]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "attnres.testing", shipped.name, *(check.name for check in checks)]
    settings = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        command, env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
