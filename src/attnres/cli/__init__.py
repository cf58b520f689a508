"""The command line: ``attnres COMMAND``, one thin file per command.

A command's module is imported only when it runs, so ``attnres --help`` is quick. A mistake of the user's ends in one
line on standard error and exit status 2; anything else keeps its traceback. Of several processes that torchrun started
rank 0 speaks for all; that another rank was lost each says for itself, with exit status 1. Commands that have no mesh
are refused there, since each process would do all of it.
"""

import errno
import importlib
import os
import sys
import time
from collections.abc import Sequence

from attnres import __version__
from attnres.errors import AttnResError, ConfigError

COMMANDS = {
    "compare": "train several residual strategies from the same start and compare them",
    "train": "train one model",
    "eval": "validation loss of a trained model",
    "generate": "continue prompts with a trained model",
    "report": "HTML report and table of a run or a comparison",
    "convert": "put a residual strategy into a trained checkpoint, without loss",
    "unconvert": "take it out again",
    "import": "make one of our checkpoints from Kimi K3's, flash-linear-attention's or Inkling-2's",
    "export": "make a Hugging Face folder of a run, or one of theirs of ours",
    "strategies": "list every residual strategy with its rule and what it costs",
    "schedule": "print which sources each site reads",
    "plan": "say what a run on many accelerators will cost: memory, traffic, step time",
    "data": "prepare text for training",
    "bench": "measure speed and memory: one read, all reads, whole models, inference",
    "conformance": "check any implementation against the definition",
}
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""What a disk says while it is written to, without the name of a file."""
ON_A_MESH = ("train", "compare")
"""Commands that several processes may share."""
SECONDS_TO_SPEAK = 3.0
"""How long others wait for rank 0 to say what is wrong: torchrun ends all processes when it sees that one has ended."""
MODULES = {"import": "import_checkpoint", "export": "export_checkpoint"}
"""Where a command's module has another name than the command."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 when done, 2 after a mistake in the input, 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        raise SystemExit(0 if arguments else 2)
    if arguments[0] == "--version":
        print(f"attnres {__version__}")
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its notes on missing kernels are not ours to print
    name, *rest = arguments
    if name not in COMMANDS:
        _fail(f"command is {name!r}; allowed: {', '.join(COMMANDS)}")
    try:
        _refuse_several(name)
        importlib.import_module(f"attnres.cli.{MODULES.get(name, name)}").main(rest)
    except AttnResError as error:
        is_lost = type(error).__name__ == "RankFailure"
        _fail(str(error), status=1 if is_lost else 2, aloud=is_lost)
    except BrokenPipeError:
        sys.stderr.close()  # the reader, such as `head`, has had enough
    except OSError as error:
        if error.filename is None and error.errno not in DISK:  # not about a file that somebody named
            raise
        _fail(f"{error.filename or 'writing'}: {error.strerror}")
    except KeyboardInterrupt:
        print("attnres: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def _refuse_several(name: str) -> None:
    """Raise where torchrun started several processes of a command that knows nothing of the others."""
    if name in ON_A_MESH or "WORLD_SIZE" not in os.environ:
        return
    from attnres.parallel.config import world_size  # loads PyTorch, which not every command does

    processes = world_size()
    if processes > 1:
        raise ConfigError(
            f"attnres {name} was started as {processes} processes (WORLD_SIZE), and each would do all of it; allowed: "
            f"one, without torchrun ({' and '.join(ON_A_MESH)} take a mesh)"
        )


def _fail(message: str, *, status: int = 2, aloud: bool = False) -> None:
    if aloud or os.environ.get("RANK", "0") == "0":
        print(f"attnres: error: {' '.join(message.split())}", file=sys.stderr)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(SECONDS_TO_SPEAK)
    raise SystemExit(status)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    return (
        "usage: attnres COMMAND [OPTIONS]\n\n"
        "Attention Residuals: a softmax attention over depth in place of the fixed residual sum.\n\n"
        f"commands:\n{commands}\n\n"
        "options:\n  -h, --help  show this help, or that of a command\n  --version   show the version"
    )
